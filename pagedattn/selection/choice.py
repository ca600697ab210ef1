"""Which blocks are taken, by their scores."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .._arrays.checks import an_array, count
from .._arrays.devices import on_one_device
from .._arrays.dlpack import takes_any_array
from .._arrays.inspect import describe, is_floating
from .._arrays.namespace import cdiv
from ..batch import validate as validate_batch
from ..batch.metadata import BatchMetadata, sequences_of
from ..errors import InvalidInputError
from .kernels import constant, kernels_for
from .selection import LAST, NONE, Selection


@takes_any_array
@on_one_device
def select_blocks(
    scores: Float[Array, "num_seqs num_kv_heads max_blocks"],
    batch: BatchMetadata,
    num_blocks: int,
    *,
    first: int = 1,
    last: int = 1,
) -> Selection[Array]:
    """The best blocks of each sequence for each KV head, the first and last ones always.

    Of equal scores the block with the lower number is better. Those of -inf are not taken, nor
    NaN: mask what must not be chosen.

    Args:
      scores: as of `score_blocks`, or any others; larger is better.
      num_blocks: how many blocks are taken, first and last ones included; static. All, if a
        sequence has no more.
      first, last: how many blocks of its beginning (attention sinks) and of its end (the newest
        tokens) a sequence always attends to; static.

    Returns:
      a Selection of `min(num_blocks, max_blocks)` blocks, 1 at least, in ascending order, then -1.

    Raises:
      InvalidInputError: scores that do not fit the batch, or less blocks than first and last ones.

    >>> from pagedattn import make_batch
    >>> batch = make_batch([1], [18], [range(5)], block_size=4)
    >>> select_blocks(jnp.array([[[0.0, 1, 3, 2, 0]]]), batch, 4).blocks.tolist()
    [[[0, 2, 3, 4]]]
    """
    validate_batch.shapes(batch)
    _require_scores(scores, batch.num_seqs, batch.max_blocks)
    num_blocks = count("num_blocks", num_blocks)
    first, last = count("first", first, 0), count("last", last, 0)
    if first + last > num_blocks:
        raise InvalidInputError(
            f"num_blocks must be at least first + last = {first + last}, got {num_blocks}"
        )
    taken = max(1, min(num_blocks, batch.max_blocks))
    if 0 in scores.shape:
        return Selection(jnp.full((*scores.shape[:2], taken), NONE, jnp.int32), ascending=True)
    columns = jnp.arange(batch.max_blocks, dtype=jnp.int32)[None, None]
    ends = cdiv(sequences_of(batch).seq_lens, batch.block_size)[:, None, None]
    always = (columns < first) | (columns >= ends - last)
    scores = constant(scores).astype(jnp.float32)
    scores = jnp.where(scores == 0, 0.0, scores)  # -0 is no less
    scores = jnp.minimum(scores, jnp.finfo(jnp.float32).max)  # those of `always` are greater
    scores = jnp.where(always, jnp.inf, scores)
    scores = jnp.where((columns < ends) & (scores > -jnp.inf), scores, -jnp.inf)
    return Selection(best(scores, taken), ascending=True)


def _require_scores(scores, num_seqs, max_blocks):
    an_array("scores", scores)
    fits = scores.ndim == 3 and is_floating(scores.dtype)
    if not (fits and scores.shape[0] == num_seqs and scores.shape[2] == max_blocks):
        raise InvalidInputError(
            "scores must be floating [num_seqs, num_kv_heads, max_blocks] = "
            f"[{num_seqs}, any, {max_blocks}], got {describe(scores)}"
        )


def best(
    scores: Float[Array, "num_seqs num_kv_heads max_blocks"], num_blocks: int
) -> Int[Array, "num_seqs num_kv_heads {num_blocks}"]:
    """The columns of the largest scores above -inf, in ascending order, then -1.

    XLA sorts twice for it, on a GPU by several programs.
    """
    kernels = kernels_for(scores)
    if kernels is not None and scores.shape[2] <= kernels.MOST_COLUMNS:
        return kernels.best(scores, num_blocks)
    return by_xla(scores, num_blocks)


def by_xla(scores, num_blocks: int):
    """`best` by XLA's sorts."""
    values, columns = jax.lax.top_k(scores, num_blocks)
    columns = jnp.sort(jnp.where(values > -jnp.inf, columns, LAST))
    return jnp.where(columns < LAST, columns, NONE).astype(jnp.int32)
