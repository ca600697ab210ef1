"""What arguments must be. Everything here raises InvalidInputError, before anything is written.

Shapes and dtypes are checked always, at trace time under jit. Values are checked on the host, and
only when they are known: the arrays of a traced call have none yet.
"""

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .errors import InvalidInputError

MAX_SLOTS = np.iinfo(np.int32).max


def require(condition, text: str) -> None:
    if not condition:
        raise InvalidInputError(text)


# Host values, for make_batch.


def lengths(name: str, values, like=None) -> np.ndarray:
    """A list of non-negative integers as int64, as long as `like`."""
    array = _integers(name, values, ndim=1)
    require(not (array < 0).any(), f"{name} must not be negative, got {array.tolist()}")
    if like is not None:
        require(
            len(array) == len(like),
            f"{name} must have one entry for each of the {len(like)} sequences, got {len(array)}",
        )
    return array


def tables(block_tables, seq_lens, block_size) -> np.ndarray:
    """Block tables as a rectangle of int64, each row long enough for its sequence."""
    require(_is_count(block_size), f"block_size must be an integer above 0, got {block_size!r}")
    rows = [_integers("block_tables", row, ndim=1) for row in block_tables]
    require(
        len(rows) == len(seq_lens),
        f"block_tables must have a row for each of the {len(seq_lens)} sequences, got {len(rows)}",
    )
    needed = -(-seq_lens // block_size)
    table = np.full((len(rows), max(map(len, rows), default=0)), -1, np.int64)
    for s, (row, count) in enumerate(zip(rows, needed, strict=True)):
        _check_row(s, row, count, seq_lens[s], block_size)
        table[s, : len(row)] = row
    return table


def _check_row(s, row, count, seq_len, block_size):
    require(
        len(row) >= count,
        f"sequence {s} of length {seq_len} needs {count} blocks of {block_size}, but its row of "
        f"block_tables has {len(row)}; allocate blocks before making the batch",
    )
    used = row[:count]
    require(
        ((used >= 0) & ((used + 1) * block_size <= MAX_SLOTS)).all(),
        f"block ids must be at least 0, and slots must fit int32; sequence {s} uses "
        f"{used.tolist()} with block_size {block_size}",
    )


def distinct_slots(slots) -> None:
    """No two tokens of a batch may be written to one slot: which one won would be chance."""
    found, counts = np.unique(slots[slots >= 0], return_counts=True)
    require(
        (counts <= 1).all(),
        f"slots {found[counts > 1].tolist()} are written by several tokens; sequences may share "
        "only blocks that this step does not write, copy the block first",
    )


def padding(name: str, needed: int, given) -> int:
    """A padded length: what is needed, or what is given if that is enough."""
    if given is None:
        return needed
    require(
        _is_count(given, 0) and given >= needed,
        f"{name} must be an integer of at least {needed}, which this batch needs, got {given!r}",
    )
    return int(given)


def _integers(name, values, ndim) -> np.ndarray:
    array = np.asarray(values)
    array = array.astype(np.int64) if array.size == 0 else array
    require(
        array.dtype.kind in "iu" and array.ndim == ndim,
        f"{name} must be integers of {ndim} dimension(s), got {array.dtype} of shape {tuple(array.shape)}",
    )
    return array.astype(np.int64)


def _is_count(value, least=1) -> bool:
    return hasattr(value, "__index__") and value.__index__() >= least


# Arrays, for the functions that take a cache.


def cache_shape(shape, dtype) -> None:
    require(
        all(_is_count(size) for size in shape) and shape[0] * shape[1] <= MAX_SLOTS,
        "num_blocks, block_size, num_kv_heads and head_dim must be integers above 0, and "
        f"num_blocks * block_size must fit int32, got {shape}",
    )
    require(_is_floating(dtype), f"a cache's dtype must be floating, got {dtype}")


def cache(cache) -> None:
    """Two planes of one shape and one floating dtype."""
    key, value = cache.key, cache.value
    require(
        key.ndim == 4 and key.shape == value.shape and key.dtype == value.dtype,
        "a cache's key and value must be [num_blocks, block_size, num_kv_heads, head_dim] of one "
        f"shape and dtype, got {_describe(key)} and {_describe(value)}",
    )
    cache_shape(tuple(key.shape), key.dtype)


def write(cache_, key, value, slot_mapping) -> None:
    cache(cache_)
    expected = (*slot_mapping.shape[:1], cache_.num_kv_heads, cache_.head_dim)
    for name, array in (("key", key), ("value", value)):
        require(
            array.shape == expected and array.dtype == cache_.dtype,
            f"{name} must be [num_tokens, num_kv_heads, head_dim] = {expected} of the cache's "
            f"dtype {cache_.dtype}, got {_describe(array)}",
        )
    _int_array("slot_mapping", slot_mapping, 1)
    slots = known(slot_mapping)
    if slots is not None:
        _ids("slot_mapping", slots[slots != -1], cache_.num_slots, "slots, or -1 for no write")
        distinct_slots(slots)


def block_copies(src_cache, dst_cache, src, dst) -> None:
    cache(src_cache)
    cache(dst_cache)
    require(
        src_cache.key.shape[1:] == dst_cache.key.shape[1:] and src_cache.dtype == dst_cache.dtype,
        "the caches must agree in block_size, num_kv_heads, head_dim and dtype, got "
        f"{_describe(src_cache.key)} and {_describe(dst_cache.key)}",
    )
    _int_array("src", src, 1)
    _int_array("dst", dst, 1)
    require(
        src.shape == dst.shape,
        f"src and dst must be equally long, got {tuple(src.shape)}, {tuple(dst.shape)}",
    )
    _known_copies(known(src), known(dst), src_cache.num_blocks, dst_cache.num_blocks)


def _known_copies(src, dst, num_src, num_dst):
    if src is not None:
        _ids("src", src, num_src, "blocks")
    if dst is not None:
        _ids("dst", dst, num_dst, "blocks")
        require(len(np.unique(dst)) == len(dst), f"dst names a block twice: {dst.tolist()}")


def attention(query, cache_, batch, spec) -> None:
    """Shapes, dtypes and, where known, values of an attention call."""
    cache(cache_)
    _query(query, cache_.dtype, cache_.num_kv_heads, cache_.head_dim, spec)
    for name in ("block_tables", "seq_lens", "query_start_loc", "positions"):
        _int_array(name, getattr(batch, name), 2 if name == "block_tables" else 1)
    num_seqs = batch.num_seqs
    require(
        batch.block_tables.shape[0] == num_seqs and batch.query_start_loc.shape[0] == num_seqs + 1,
        f"with seq_lens of {num_seqs} sequences, block_tables must have as many rows and "
        f"query_start_loc one entry more, got {tuple(batch.block_tables.shape)} and "
        f"{tuple(batch.query_start_loc.shape)}",
    )
    require(
        query.shape[0] == batch.num_tokens,
        f"query must have the batch's {batch.num_tokens} tokens, got shape {tuple(query.shape)}",
    )
    require(
        batch.block_size == cache_.block_size,
        f"the batch was made for blocks of {batch.block_size}, the cache has {cache_.block_size}",
    )
    _batch_values(batch, cache_.num_blocks)


def _query(query, dtype, num_kv_heads, head_dim, spec):
    require(
        query.ndim == 3 and query.shape[2] == head_dim and query.dtype == dtype,
        f"query must be [num_tokens, num_heads, head_dim] with head_dim {head_dim} and the "
        f"cache's dtype {dtype}, got {_describe(query)}",
    )
    num_heads = query.shape[1]
    require(
        num_heads > 0 and num_heads % num_kv_heads == 0,
        f"num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}",
    )
    slopes = spec.alibi_slopes
    require(
        slopes is None or len(slopes) == num_heads,
        f"alibi_slopes must have one slope for each of the {num_heads} query heads, got "
        f"{len(slopes or ())}",
    )


def _batch_values(batch, num_blocks):
    starts, seq_lens, table = (
        known(array) for array in (batch.query_start_loc, batch.seq_lens, batch.block_tables)
    )
    if starts is not None:
        _starts("query_start_loc", starts, batch.num_tokens, batch.max_query_len)
    if seq_lens is None or table is None:
        return
    width = table.shape[1]
    needed = -(-seq_lens // batch.block_size)
    require(
        ((seq_lens >= 0) & (needed <= width)).all(),
        f"seq_lens must be between 0 and what {width} blocks of {batch.block_size} hold, got "
        f"{seq_lens.tolist()}",
    )
    used = table[np.arange(width) < needed[:, None]]
    _ids("block_tables", used, num_blocks, "blocks")


def ragged(query, key, value, query_start_loc, key_start_loc, spec, max_lens) -> None:
    require(
        key.ndim == 3 and key.shape == value.shape and key.dtype == value.dtype,
        "key and value must be [num_keys, num_kv_heads, head_dim] of one shape and dtype, got "
        f"{_describe(key)} and {_describe(value)}",
    )
    require(_is_floating(key.dtype), f"key must be floating, got {key.dtype}")
    _query(query, key.dtype, key.shape[1], key.shape[2], spec)
    arrays = {"query_start_loc": query_start_loc, "key_start_loc": key_start_loc}
    counts = (query.shape[0], key.shape[0])
    for (name, starts), count, longest in zip(arrays.items(), counts, max_lens, strict=True):
        _int_array(name, starts, 1)
        require(_is_count(longest, 0), f"max_{name[:-10]}_len must be an integer, got {longest!r}")
        if known(starts) is not None:
            _starts(name, known(starts), count, longest)
    require(
        query_start_loc.shape == key_start_loc.shape and len(query_start_loc) > 0,
        "query_start_loc and key_start_loc must be [num_seqs + 1] both, got "
        f"{tuple(query_start_loc.shape)} and {tuple(key_start_loc.shape)}",
    )


def _starts(name, starts, count, longest):
    spans = np.diff(starts)
    require(
        starts[0] == 0 and (spans >= 0).all() and starts[-1] <= count,
        f"{name} must rise from 0 to at most {count}, got {starts.tolist()}",
    )
    require(
        spans.max(initial=0) <= longest,
        f"the longest span of {name} is {spans.max(initial=0)}, above its static bound {longest}",
    )


def _int_array(name, array, ndim):
    require(
        array.ndim == ndim and jnp.issubdtype(_numpy_dtype(array.dtype), jnp.integer),
        f"{name} must be integers of {ndim} dimension(s), got {_describe(array)}",
    )


def _ids(name, ids, bound, what):
    bad = ids[(ids < 0) | (ids >= bound)]
    require(not bad.size, f"{name} must name {what} from 0 to {bound - 1}, got {bad[:8].tolist()}")


def _is_floating(dtype) -> bool:
    return jnp.issubdtype(_numpy_dtype(dtype), jnp.floating)


def _numpy_dtype(dtype) -> np.dtype:
    """The dtype of a NumPy, JAX or torch array; torch's has no NumPy form but its name."""
    return jnp.dtype(str(dtype).removeprefix("torch.") if "torch" in str(dtype) else dtype)


def _describe(array) -> str:
    return f"{array.dtype}{list(array.shape)}"


def known(array) -> np.ndarray | None:
    """The values of an array; None while it is traced, or where a torch tensor is not on the CPU.

    Reading a tensor from a GPU would wait for it, and is an error in a CUDA graph.
    """
    on_device = hasattr(array, "new_tensor") and array.device.type != "cpu"
    return None if is_traced(array) or on_device else np.asarray(array)


def is_traced(array) -> bool:
    """Whether the array is inside jit, grad, vmap or scan, where it has no value yet."""
    return isinstance(array, Tracer)
