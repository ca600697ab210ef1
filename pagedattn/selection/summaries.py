"""What the keys of each block of a cache are like, kept up to date with what steps write."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Generic

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from .._arrays.checks import an_array, known_sizes
from .._arrays.devices import on_one_device
from .._arrays.dlpack import takes_any_array
from .._arrays.inspect import describe, is_floating, shown
from .._arrays.namespace import cdiv
from .._arrays.typing import ArrayT
from ..batch import validate as validate_batch
from ..batch.indices import PAD_SLOT, sequence_ids
from ..batch.metadata import BatchMetadata, Sequences, nondecreasing_starts, sequences_of
from ..cache import validate as validate_cache
from ..cache.kv_cache import KVCache
from ..cache.packing import name_of
from ..cache.quantise import dequantised, largest, of_tokens
from ..errors import InvalidInputError
from ..writes import set_rows

Keys = Shaped[Array, "n block_size num_kv_heads head_dim"]
Filled = Int[Array, "n"]
Rows = Float[Array, "n num_kv_heads head_dim"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockSummaries(Generic[ArrayT]):
    """What the keys of each block of one layer's cache are like, for each KV head.

    Blocks without keys hold anything.

    Fields:
      planes: `(least, greatest)` of each key column (Tang et al., 2024, "Quest"), or `(mean,)`. The
        least are rounded down and the greatest up, means to the nearest.

    >>> plane = jnp.zeros((4, 2, 64))
    >>> BlockSummaries((plane, plane)).num_blocks
    4
    """

    planes: tuple[Float[ArrayT, "num_blocks num_kv_heads head_dim"], ...]

    @property
    def num_blocks(self) -> int:
        return self.planes[0].shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.planes[0].shape[1]


@takes_any_array
@on_one_device
def summarise_blocks(
    cache: KVCache, batch: BatchMetadata, *, kind: str = "range", dtype: DTypeLike | None = None
) -> BlockSummaries[Array]:
    """Summaries of all blocks of a batch's sequences, of the keys that they have after its step.

    It reads all keys of the cache. Later steps keep the summaries up to date with
    `update_summaries`, which reads what they wrote.

    Args:
      batch: its block tables and lengths say which slots are written: no others count.
      kind: "range" keeps the least and the greatest of each key column, "mean" their mean.
      dtype: a floating one that the summaries are to have. By default the cache's, or bfloat16 for
        a quantised one. "float8_e4m3fn" halves those of bfloat16, which is what a CPU's scores wait
        for; beyond 448 it holds 448.

    Raises:
      InvalidInputError: cache and batch do not fit together, or there is no such kind or dtype.

    >>> from pagedattn import KVCache, make_batch
    >>> key = jnp.arange(8.0).reshape(2, 4, 1, 1)
    >>> batch = make_batch([1], [6], [[1, 0]], block_size=4)
    >>> [plane.ravel().tolist() for plane in summarise_blocks(KVCache(key, key), batch).planes]
    [[0.0, 4.0], [2.0, 7.0]]
    """
    _require(cache, batch)
    if not (isinstance(kind, str) and kind in KINDS):
        raise InvalidInputError(f"kind must be one of {[*KINDS]}, got {shown(kind)}")
    filled = _filled(cache, sequences_of(batch))
    dtype = _dtype_for(cache) if dtype is None else _floating(dtype)
    return BlockSummaries(_summaries(_keys(cache), filled, KINDS[kind], dtype))


@takes_any_array
@on_one_device
def update_summaries(
    summaries: BlockSummaries, cache: KVCache, batch: BatchMetadata
) -> BlockSummaries[Array]:
    """The summaries after a step: those of the blocks that it wrote to are made anew.

    Call it after `write_kv`, with the step's batch. In place when an enclosing `jax.jit` donates
    the summaries. What a step reads and computes follows from its number of tokens alone.

    Raises:
      InvalidInputError: summaries, cache and batch that do not fit together.

    >>> from pagedattn import KVCache, make_batch
    >>> key = jnp.arange(8.0).reshape(2, 4, 1, 1)
    >>> empty = BlockSummaries((jnp.zeros((2, 1, 1)),))  # means
    >>> batch = make_batch([2], [1], [[1]], block_size=4)
    >>> update_summaries(empty, KVCache(key, key), batch).planes[0].ravel().tolist()
    [0.0, 5.0]
    """
    _require(cache, batch)
    require_summaries(summaries)
    if summaries.planes[0].shape != (cache.num_blocks, cache.num_kv_heads, cache.head_dim):
        raise InvalidInputError(
            "summaries must be those of the cache, [num_blocks, num_kv_heads, head_dim] = "
            f"[{cache.num_blocks}, {cache.num_kv_heads}, {cache.head_dim}], got "
            f"{tuple(summaries.planes[0].shape)}"
        )
    if is_empty(cache.num_blocks, batch):
        return replace(summaries, planes=tuple(map(jnp.asarray, summaries.planes)))
    blocks, filled = _written(nondecreasing_starts(sequences_of(batch)), batch)
    reduce = KINDS["range" if len(summaries.planes) == 2 else "mean"]
    dtype = summaries.planes[0].dtype
    rows = _summaries(_keys(cache, blocks), filled, reduce, dtype)
    planes = zip(summaries.planes, rows, strict=True)
    return replace(summaries, planes=tuple(set_rows(plane, blocks, new) for plane, new in planes))


def is_empty(num_blocks: int, batch: BatchMetadata) -> bool:
    """Whether the shapes leave no token that could have a block."""
    return 0 in (num_blocks, batch.num_tokens, batch.num_seqs, batch.max_blocks)


def require_summaries(summaries) -> None:
    """Requires one plane, or two alike."""
    planes = summaries.planes if isinstance(summaries, BlockSummaries) else None
    if not (isinstance(planes, tuple) and len(planes) in (1, 2)):
        raise InvalidInputError(
            f"summaries must be BlockSummaries, got {shown(summaries)}: summarise_blocks makes them"
        )
    for plane in planes:
        an_array("a plane of summaries", plane)
        known_sizes("a plane of summaries", plane)
        if plane.ndim != 3 or 0 in plane.shape[1:] or not is_floating(plane.dtype):
            raise InvalidInputError(
                "a plane of summaries must be floating [num_blocks, num_kv_heads, head_dim], got "
                f"{describe(plane)}"
            )
    if len({(plane.shape, str(plane.dtype)) for plane in planes}) > 1:
        raise InvalidInputError(f"planes of summaries must be alike, got {shown(planes)}")


def _require(cache, batch):
    validate_cache.kv_cache(cache)
    validate_cache.scales(cache)
    validate_batch.fits(batch, cache)


def _filled(cache: KVCache, batch: Sequences) -> Filled:
    """How many keys each block of the cache holds."""
    ends = batch.seq_lens[:, None] - cache.block_size * jnp.arange(batch.max_blocks)[None]
    counts = jnp.clip(ends, 0, cache.block_size).astype(jnp.int32)
    blocks = jnp.where(counts > 0, batch.block_tables, PAD_SLOT)
    none = jnp.zeros(cache.num_blocks, jnp.int32)
    return none.at[blocks].max(counts, mode="drop", wrap_negative_indices=False)


def _written(batch: Sequences, step: BatchMetadata) -> tuple[Filled, Filled]:
    """The blocks that a step wrote to, -1 for none, and how many keys each of them holds."""
    size, num_seqs = step.block_size, batch.num_seqs
    first = jnp.maximum(batch.context_lens, 0) // size
    # Of a sequence's new tokens the last one is written, if any is: windows leave out first ones.
    last = jnp.asarray(step.slot_mapping).at[batch.query_start_loc[1:] - 1].get(mode="clip")
    writes = (batch.query_lens > 0) & (last >= 0)
    counts = jnp.where(writes, cdiv(batch.seq_lens, size) - first, 0)
    counts = jnp.cumsum(jnp.maximum(counts, 0)).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), counts])
    most = min(step.num_tokens, step.num_tokens // size + 2 * num_seqs)
    owners = sequence_ids(starts, most)
    seqs = jnp.maximum(owners, 0)
    columns = first[seqs] + jnp.arange(most, dtype=jnp.int32) - starts[seqs]
    blocks = batch.block_tables.at[seqs, columns].get(mode="clip")
    filled = jnp.clip(batch.seq_lens[seqs] - size * columns, 0, size)
    return jnp.where(owners >= 0, blocks, PAD_SLOT), filled


def _keys(cache: KVCache, blocks: Filled | None = None) -> Keys:
    """The keys of some blocks or of all; those that a quantised cache stands for."""

    def held(array):
        array = jnp.asarray(array)
        return array if blocks is None else array.at[blocks].get(mode="clip")

    keys, scale = held(cache.key), cache.key_scale
    if scale is None and largest(cache.dtype) is None:
        return keys
    return dequantised(keys, held(scale) if of_tokens(scale) else scale, jnp.float32)


def _dtype_for(cache: KVCache):
    return cache.dtype if largest(cache.dtype) is None else jnp.bfloat16


def _floating(dtype):
    if not (isinstance(dtype, Hashable) and name_of(dtype) in DTYPES):
        raise InvalidInputError(f"dtype must be one of {[*DTYPES]}, got {shown(dtype)}")
    return jnp.dtype(name_of(dtype))


def _summaries(keys: Keys, filled: Filled, reduce, dtype) -> tuple[Rows, ...]:
    """The planes of some blocks, of the first `filled` keys of each."""
    written = jnp.arange(keys.shape[1])[None] < filled[:, None]
    return reduce(keys, written[..., None, None], dtype)


def _range(keys, written, dtype):
    seen = written.any(1)
    least = jnp.min(jnp.where(written, keys, jnp.inf), 1)
    greatest = jnp.max(jnp.where(written, keys, -jnp.inf), 1)
    least, greatest = jnp.where(seen, least, 0), jnp.where(seen, greatest, 0)
    return rounded_down(least, dtype), -rounded_down(-greatest, dtype)


def _mean(keys, written, dtype):
    wide = jnp.where(written, keys.astype(jnp.float32), 0)
    counts = jnp.maximum(written.sum(1), 1).astype(jnp.float32)
    return (_nearest(_sum_in_one_order(wide) / counts, dtype),)


def _sum_in_one_order(wide: Keys) -> Rows:
    """Over the keys of each block, by halves: the order of XLA's own sum varies with the blocks."""
    while (size := wide.shape[1]) > 1:
        wide = jnp.pad(wide, [(0, 0), (0, size % 2), (0, 0), (0, 0)])
        wide = wide[:, : cdiv(size, 2)] + wide[:, cdiv(size, 2) :]
    return wide[:, 0]


def _nearest(rows: Rows, dtype) -> Rows:
    """Numbers of another dtype; in eight bits, which lack infinity, at most its largest."""
    bound = largest(dtype)
    return (rows if bound is None else jnp.clip(rows, -bound, bound)).astype(dtype)


def rounded_down(rows: Rows, dtype) -> Rows:
    """The greatest numbers of a dtype that are not above the given ones, but for `_nearest`."""
    held, bits = _nearest(rows, dtype), jnp.dtype(f"int{jnp.finfo(dtype).bits}")
    found = jax.lax.bitcast_convert_type(held, bits)
    # Signs and magnitudes: above 0 one less is the next number below, and under 0 one more.
    least_negative = jnp.iinfo(bits).min + 1
    below = jnp.where(found > 0, found - 1, jnp.where(found == 0, least_negative, found + 1))
    below = jax.lax.bitcast_convert_type(below.astype(bits), dtype)
    above = held.astype(jnp.float32) > rows.astype(jnp.float32)
    return jnp.where(above & (held > -jnp.finfo(dtype).max), below, held)


KINDS = {"range": _range, "mean": _mean}
DTYPES = "bfloat16", "float16", "float32", "float8_e4m3fn"
