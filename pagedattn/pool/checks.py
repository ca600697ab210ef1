"""Checks of the arguments of functions on block pools, which are returned as int32 arrays."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from .._arrays.checks import MAX_SLOTS, count, ids
from .._arrays.inspect import known, shown
from .._arrays.int32 import int32_array
from .._arrays.namespace import cdiv
from ..batch import validate as validate_batch
from ..cache import validate as validate_cache
from ..cache.kv_cache import KVCache
from ..errors import InvalidInputError
from ..spec import window_of

FIELDS = {
    "free_blocks": 1,
    "num_free": 0,
    "ref_counts": 1,
    "hold_counts": 1,
    "block_tables": 2,
    "seq_lens": 1,
}


def counts(**sizes) -> list[int]:
    sizes = {name: count(name, size) for name, size in sizes.items()}
    for name in ("num_blocks", "max_blocks"):
        slots = sizes[name] * sizes["block_size"]
        if not slots <= MAX_SLOTS:
            raise InvalidInputError(f"{name} * block_size must fit int32, got {slots}")
    return list(sizes.values())


def pool(pool, name="pool"):
    """A block pool of arrays of any framework, as JAX arrays."""
    arrays = {}
    for field, ndim in FIELDS.items():
        if not hasattr(pool, field):
            raise InvalidInputError(f"{name} must be a BlockPool, got {type(pool).__name__}")
        arrays[field] = int32_array(f"{name}.{field}", getattr(pool, field), ndim)
    block_size = count(f"{name}.block_size", pool.block_size)
    for left, right in (
        ("free_blocks", "ref_counts"),
        ("hold_counts", "ref_counts"),
        ("block_tables", "seq_lens"),
    ):
        sizes = len(arrays[left]), len(arrays[right])
        if sizes[0] != sizes[1]:
            raise InvalidInputError(f"{name}.{left} and .{right} must be equally long: {sizes}")
    return replace(pool, **arrays, block_size=block_size)


def growth(num_tokens, max_seqs, max_new_tokens):
    if max_new_tokens is not None:
        max_new_tokens = count("max_new_tokens", max_new_tokens, 0)
    return per_sequence("num_tokens", num_tokens, max_seqs), max_new_tokens


def behind(pool_, window, max_new_tokens):
    """The pool, the window, and how many blocks of a sequence the bound lets it leave behind."""
    pool_, window = pool(pool_), window_of("window", window)
    if max_new_tokens is None:
        return pool_, window, pool_.max_blocks
    blocks = cdiv(count("max_new_tokens", max_new_tokens, 0), pool_.block_size)
    return pool_, window, min(max(blocks, 1), pool_.max_blocks)


def packing(query_lens, max_seqs, num_tokens, max_query_len):
    """New tokens of each sequence, which a batch of these static sizes must hold where known."""
    num_tokens = count("num_tokens", num_tokens, 0)
    max_query_len = count("max_query_len", max_query_len, 0)
    query_lens = per_sequence("query_lens", query_lens, max_seqs)
    queries = known(query_lens)
    if queries is None:
        return query_lens, (num_tokens, max_query_len)
    needed, longest = queries.sum(), queries.max(initial=0)
    if needed > num_tokens or longest > max_query_len:
        raise InvalidInputError(
            f"query_lens {queries.tolist()} need num_tokens of {needed} and max_query_len of "
            f"{longest} at least, got {num_tokens} and {max_query_len}"
        )
    return query_lens, (num_tokens, max_query_len)


def parents(parents_, query_lens, num_tokens):
    """Parents of packed tokens, which must come before these where that is known; None if none."""
    if parents_ is None:
        return None
    parents_ = int32_array("parents", parents_, 1)
    if len(parents_) != num_tokens:
        raise InvalidInputError(f"parents must have {num_tokens} entries, got {len(parents_)}")
    values, queries = known(parents_), known(query_lens)
    if values is not None and queries is not None:
        validate_batch.require_parents(values, np.append(0, np.cumsum(queries)))
    return parents_


def path(path_, batch, pool_):
    """A path through each sequence's new tokens, which rises to its end where that is known."""
    path_, rows = int32_array("path", path_, 2), pool_.max_seqs
    if len(path_) != rows or batch.num_seqs != rows:
        raise InvalidInputError(
            f"path and batch must have the pool's {rows} sequences, got {len(path_)} and "
            f"{batch.num_seqs}"
        )
    values, starts = known(path_), known(batch.query_start_loc)
    if values is None or starts is None:
        return path_
    used = np.logical_and.accumulate(values != -1, axis=1)
    before = np.pad(values, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    wrong = used & ((values <= before) | (values >= np.diff(starts)[:, None]))
    if wrong.any():
        row = int(wrong.any(axis=1).argmax())
        raise InvalidInputError(
            "path must hold rising indices of a sequence's new tokens, then -1, got "
            f"{values[row].tolist()} for the {np.diff(starts)[row]} of sequence {row}"
        )
    return path_


def is_cache(leaf) -> bool:
    return isinstance(leaf, KVCache)


def caches(caches_) -> None:
    """Requires a tree of caches."""
    for leaf in jax.tree.leaves(caches_, is_leaf=is_cache):
        if not is_cache(leaf):
            raise InvalidInputError(f"caches must hold KVCaches, got {shown(leaf)}")
        validate_cache.kv_cache(leaf)


def appended(query_lens, seq_lens) -> None:
    """Requires that sequences have the tokens that are called new, as far as that is known."""
    queries, lens = known(query_lens), known(seq_lens)
    if queries is not None and lens is not None and not (queries <= lens).all():
        raise InvalidInputError(
            f"query_lens must not exceed the sequences' lengths {lens.tolist()}, got "
            f"{queries.tolist()}; append the tokens first, as next_batch does"
        )


def pools(pools_):
    """Pools of the same sequences, as lists of JAX arrays."""
    if not (isinstance(pools_, Sequence) and len(pools_) > 0):
        raise InvalidInputError(
            f"pools must be a list of BlockPools, got {type(pools_).__name__}; of one pool "
            "next_batch makes the batch"
        )
    checked = [pool(each, f"pools[{index}]") for index, each in enumerate(pools_)]
    sizes = [each.max_seqs for each in checked]
    if len(set(sizes)) != 1:
        raise InvalidInputError(f"pools must have the same rows, got max_seqs of {sizes}")
    return checked


def ids_or_none(name, array, bound, what="blocks", ndim=1):
    """Ids below `bound`, or -1 for none."""
    array = int32_array(name, array, ndim)
    values = known(array)
    if values is not None:
        ids(name, values[values != -1], bound, what, ", or -1")
    return array


def per_sequence(name, array, max_seqs):
    array = int32_array(name, array, 1)
    if len(array) != max_seqs:
        raise InvalidInputError(f"{name} must have {max_seqs} entries, got {len(array)}")
    values = known(array)
    if values is not None and not (values >= 0).all():
        raise InvalidInputError(f"{name} must not be negative, got {values.tolist()}")
    return array


def rows(bound, **lists):
    """Equally long lists of rows of a pool; -1 stands for no row."""
    arrays = [ids_or_none(name, array, bound, "sequences") for name, array in lists.items()]
    equally_long(**dict(zip(lists, arrays, strict=True)))
    return arrays


def equally_long(**lists) -> None:
    sizes = {len(array) for array in lists.values()}
    if len(sizes) != 1:
        raise InvalidInputError(f"{' and '.join(lists)} must be equally long, got {sorted(sizes)}")


def prefix(seq, blocks, num_tokens, pool):
    seq = ids_or_none("seq", seq, pool.max_seqs, "a sequence", ndim=0)
    blocks = int32_array("blocks", blocks, 1)
    num_tokens = int32_array("num_tokens", num_tokens, 0)
    if not len(blocks) <= pool.max_blocks:
        raise InvalidInputError(
            f"blocks must fit a table row of {pool.max_blocks}, got {len(blocks)}"
        )
    values, tokens = known(blocks), known(num_tokens)
    if values is not None and tokens is not None:
        room = len(values) * pool.block_size
        if not 0 <= tokens <= room:
            raise InvalidInputError(f"num_tokens must be from 0 to {room}, got {tokens}")
        used = values[: cdiv(tokens, pool.block_size)]
        left = used[np.cumsum(used != -1) > 0]  # the first may have been given back
        if not len(left) and tokens:
            raise InvalidInputError(f"blocks must end with a block, got {used.tolist()}")
        ids("blocks", left, pool.num_blocks, "blocks")
    return seq, blocks, num_tokens


def swap(device, host, seqs, host_seqs):
    device, host = pool(device), pool(host, "host_pool")
    sizes = (device.block_size, host.block_size)
    if sizes[0] != sizes[1]:
        raise InvalidInputError(f"both pools must have one block_size, got {sizes}")
    (seqs,) = rows(device.max_seqs, seqs=seqs)
    (host_seqs,) = rows(host.max_seqs, host_seqs=host_seqs)
    equally_long(seqs=seqs, host_seqs=host_seqs)
    return device, host, seqs, host_seqs
