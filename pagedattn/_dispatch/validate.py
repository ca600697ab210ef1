"""Checks of the arguments of attention calls.

Shapes and dtypes are always checked, under jit while tracing. Values are checked only where they
are known on the host: traced arrays have none yet, and reading a GPU's would wait for it.
"""

from .._arrays.checks import (
    an_array,
    count,
    flag,
    int_array,
    known_sizes,
    packed,
    start_locs,
)
from .._arrays.inspect import describe, is_floating, known
from ..batch import validate as validate_batch
from ..cache.validate import dtypes_for, goes_with, kv_cache
from ..errors import InvalidInputError
from ..spec import require_spec


def attention(query, cache, batch, spec, return_lse, batch_invariant=False) -> None:
    """Checks shapes, dtypes and, where they are known, values of an attention call."""
    flag("return_lse", return_lse)
    flag("batch_invariant", batch_invariant)
    kv_cache(cache)
    validate_batch.fits(batch, cache)
    require_spec(spec)
    _query(query, cache.dtype, cache.num_kv_heads, cache.head_dim, spec)
    if query.shape[0] != batch.num_tokens:
        raise InvalidInputError(
            f"query must have the batch's {batch.num_tokens} tokens, got shape {tuple(query.shape)}"
        )
    if batch.tree is not None and not spec.causal:
        raise InvalidInputError(
            "parents say which new tokens a token follows: causal attention alone has them, got "
            "causal=False; make the batch without parents"
        )
    validate_batch.values(batch, cache.num_blocks, spec.sliding_window)


def ragged(query, key, value, query_start_loc, key_start_loc, spec, max_lens) -> tuple[int, int]:
    """The bounds as Python's integers, no larger than there are queries and keys."""
    longest_query = count("max_query_len", max_lens[0], 0)
    longest_key = count("max_key_len", max_lens[1], 0)
    _packed_keys(key, value)
    require_spec(spec)
    _query(query, key.dtype, key.shape[1], key.shape[2], spec)
    starts = {"query_start_loc": query_start_loc, "key_start_loc": key_start_loc}
    _packed_starts(starts, (query.shape[0], longest_query), (key.shape[0], longest_key))
    return min(longest_query, query.shape[0]), min(longest_key, key.shape[0])


def _packed_keys(key, value) -> None:
    an_array("key", key)
    an_array("value", value)
    known_sizes("key", key)
    packed("key", key)
    packed("value", value)
    if not (
        key.ndim == value.ndim == 3
        and key.shape[:2] == value.shape[:2]
        and key.dtype == value.dtype
    ):
        raise InvalidInputError(
            "key and value must be [num_keys, num_kv_heads, head_dim] and [num_keys, "
            f"num_kv_heads, value_dim] of one dtype, got {describe(key)} and {describe(value)}"
        )
    if not is_floating(key.dtype):
        raise InvalidInputError(f"key must be floating, got {key.dtype}")


def _packed_starts(arrays, *bounds) -> None:
    """`bounds` are, of queries and of keys, how many there are and the longest sequence's."""
    for (name, starts), (tokens, longest) in zip(arrays.items(), bounds, strict=True):
        int_array(name, starts, 1)
        known_sizes(name, starts)
        if not len(starts) > 0:
            raise InvalidInputError(f"{name} must be [num_seqs + 1], got no entry")
        if known(starts) is not None:
            start_locs(name, known(starts), tokens, longest)
    queries, keys = (tuple(starts.shape) for starts in arrays.values())
    if queries != keys:
        raise InvalidInputError(
            "query_start_loc and key_start_loc must be [num_seqs + 1] both, got "
            f"{queries} and {keys}"
        )


def parents(array, query, query_start_loc) -> None:
    """Requires a parent for each packed query, which comes before it where that is known."""
    int_array("parents", array, 1)
    if len(array) != query.shape[0]:
        raise InvalidInputError(
            f"parents must have one entry for each of the {query.shape[0]} tokens, got {len(array)}"
        )
    values, starts = known(array), known(query_start_loc)
    if values is not None and starts is not None:
        validate_batch.require_parents(values, starts)


def _query(query, dtype, num_kv_heads, head_dim, spec):
    an_array("query", query)
    known_sizes("query", query)
    packed("query", query)
    if not (query.ndim == 3 and query.shape[2] == head_dim):
        raise InvalidInputError(
            f"query must be [num_tokens, num_heads, head_dim] with head_dim {head_dim}, got "
            f"{describe(query)}"
        )
    if not goes_with(query.dtype, dtype):
        raise InvalidInputError(
            f"keys and values of {dtype} do not go with a query of {query.dtype}, which must be of "
            f"{dtypes_for(dtype)}: cast the query, or make a cache that is not quantised with its "
            "dtype (init_kv_cache(..., dtype=query.dtype))"
        )
    num_heads = query.shape[1]
    if not (num_heads > 0 and num_kv_heads > 0 and num_heads % num_kv_heads == 0):
        raise InvalidInputError(
            f"num_heads must be a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}"
        )
    slopes = spec.alibi_slopes
    if slopes is not None and len(slopes) != num_heads:
        raise InvalidInputError(
            f"alibi_slopes must have one slope for each of the {num_heads} query heads, got "
            f"{len(slopes or ())}"
        )
