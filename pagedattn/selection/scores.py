"""How large the logits of each block may be, for the queries of a step."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._arrays.checks import an_array, packed
from .._arrays.devices import on_one_device
from .._arrays.dlpack import takes_any_array
from .._arrays.inspect import describe, is_floating
from .._arrays.namespace import cdiv, in_range
from ..batch import validate as validate_batch
from ..batch.metadata import BatchMetadata, Sequences, nondecreasing_starts, sequences_of
from ..errors import InvalidInputError
from .kernels import constant, kernels_for
from .summaries import BlockSummaries, is_empty, require_summaries

CHUNK = 256  # blocks at a time: their summaries stay in a CPU's cache

Parts = tuple[Float[Array, "num_seqs rows num_kv_heads head_dim"], ...]
Planes = tuple[Float[Array, "num_blocks num_kv_heads head_dim"], ...]
Scores = Float[Array, "num_seqs num_kv_heads max_blocks"]


@takes_any_array
@on_one_device
def score_blocks(
    query: Float[Array, "num_tokens num_heads head_dim"],
    summaries: BlockSummaries,
    batch: BatchMetadata,
) -> Scores:
    """What the logits of each block's keys are at most, or on average: larger is better.

    With the least and greatest of each key column (Quest) a bound, with the means an estimate:

        score = sum over d of max(q_d * least_d, q_d * greatest_d)       or  <q, mean>

    before the spec's scale, and the greatest of those of all query heads of a KV head's group, and
    of all the sequence's queries. Meant for decode and short queries: its work grows with
    `max_query_len`. Scores have no gradients.

    Returns:
      float32 `[num_seqs, num_kv_heads, max_blocks]`, -inf for columns of the block tables without
      a block of the sequence, and for sequences without queries.

    Raises:
      InvalidInputError: query, summaries and batch that do not fit together.

    >>> from pagedattn import make_batch
    >>> summaries = BlockSummaries((jnp.full((2, 1, 1), -1.0), jnp.arange(2.0).reshape(2, 1, 1)))
    >>> batch = make_batch([1], [6], [[1, 0]], block_size=4)
    >>> score_blocks(jnp.full((1, 1, 1), 3.0), summaries, batch).tolist()
    [[[3.0, 0.0]]]
    """
    validate_batch.shapes(batch)
    require_summaries(summaries)
    _require_query(query, summaries, batch)
    if is_empty(summaries.num_blocks, batch):
        shape = batch.num_seqs, summaries.num_kv_heads, batch.max_blocks
        return jnp.full(shape, -jnp.inf, jnp.float32)
    sequences = nondecreasing_starts(sequences_of(batch))
    query, *planes = (constant(x) for x in (query, *summaries.planes))
    rows, num_rows = _rows(query, sequences, batch, summaries.num_kv_heads)
    planes, parts = tuple(planes), (rows,)
    if len(planes) == 2:
        # max(q * least, q * greatest) is q * greatest for q above 0, and q * least below.
        parts = jnp.minimum(rows, 0), jnp.maximum(rows, 0)
    blocks = _blocks(sequences, batch, summaries.num_blocks)
    return _kernel(query, planes)(parts, num_rows, planes, blocks)


def _require_query(query, summaries, batch):
    an_array("query", query)
    packed("query", query)
    _, num_kv_heads, head_dim = summaries.planes[0].shape
    fits = query.ndim == 3 and is_floating(query.dtype) and query.shape[2] == head_dim
    if not (fits and query.shape[0] == batch.num_tokens and query.shape[1] % num_kv_heads == 0):
        raise InvalidInputError(
            "query must be floating [num_tokens, num_heads, head_dim] with the batch's "
            f"{batch.num_tokens} tokens, the summaries' head_dim {head_dim}, and a multiple of "
            f"their {num_kv_heads} KV heads, got {describe(query)}"
        )


def _rows(query, batch: Sequences, step: BatchMetadata, num_kv_heads: int):
    """The queries of each sequence, a row for each of its tokens and heads; how many it has."""
    longest = max(1, min(step.max_query_len, step.num_tokens))
    offsets = jnp.arange(longest, dtype=jnp.int32)[None]
    rows = query.at[batch.query_start_loc[:-1, None] + offsets].get(mode="clip")
    rows = rows.reshape(batch.num_seqs, longest, num_kv_heads, -1, query.shape[2])
    group = rows.shape[3]
    rows = rows.swapaxes(2, 3).reshape(batch.num_seqs, longest * group, num_kv_heads, -1)
    return rows, group * batch.query_lens


def _blocks(
    batch: Sequences, step: BatchMetadata, num_blocks: int
) -> Int[Array, "num_seqs max_blocks"]:
    """The block tables, -1 where a sequence has no block."""
    columns = jnp.arange(batch.max_blocks, dtype=jnp.int32)[None]
    own = columns < cdiv(batch.seq_lens, step.block_size)[:, None]
    return jnp.where(own & in_range(batch.block_tables, num_blocks), batch.block_tables, -1)


def _kernel(query, planes) -> Callable:
    """What computes the scores: a kernel of the device's own, if it takes the dtypes, or XLA."""
    kernels = kernels_for(query)
    if kernels is not None and kernels.takes(str(query.dtype), str(planes[0].dtype)):
        return kernels.scores
    return by_xla


@jax.jit
def by_xla(
    parts: Parts,
    num_rows: Int[Array, "num_seqs"],
    planes: Planes,
    blocks: Int[Array, "num_seqs max_blocks"],
) -> Scores:
    """By XLA, some blocks at a time."""
    valid = jnp.arange(parts[0].shape[1])[None] < num_rows[:, None]

    def score(chunk: Int[Array, "num_seqs chunk"]):
        summed = jnp.zeros((), jnp.float32)
        for part, plane in zip(parts, planes, strict=True):
            rows = plane.at[chunk].get(mode="clip").astype(jnp.float32)
            wide = part.astype(jnp.float32)
            summed += jnp.einsum("srhd,schd->shrc", wide, rows, precision="highest")
        best = jnp.where(valid[:, None, :, None], summed, -jnp.inf).max(2)
        return jnp.where((chunk >= 0)[:, None], best, -jnp.inf)

    num_seqs, max_blocks = blocks.shape
    chunk = min(CHUNK, max_blocks)
    chunks = jnp.pad(blocks, [(0, 0), (0, -max_blocks % chunk)], constant_values=-1)
    scores = jax.lax.map(score, chunks.reshape(num_seqs, -1, chunk).swapaxes(0, 1))
    scores = scores.transpose(1, 2, 0, 3).reshape(num_seqs, scores.shape[2], -1)
    return scores[..., :max_blocks]
