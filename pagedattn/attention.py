"""The two entry points: attention over a paged cache, and over packed keys without one."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from . import dispatch, validate
from .batch import BatchMetadata, as_int32
from .blocks import positions
from .cache import KVCache
from .foreign import takes_any_array
from .integers import rising
from .manual_axes import axes_of, varying
from .spec import AttentionSpec


@takes_any_array
def paged_attention(
    query: Float[Array, "num_tokens num_heads head_dim"],
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    *,
    backend: str | None = None,
    return_lse: bool = False,
):
    """Attention of packed queries over the blocks of a cache.

    Prefill, chunked prefill, decode and any mix are this one call: write the new keys and values
    with `write_kv` first, then attend. Encoders and cross attention are this call with
    `causal=False` and the key side's own tables and lengths.

    Outside jit the arrays may be torch's, or any with DLPack: they are shared, or refused.

    Several devices: call it inside `jax.shard_map`, with the heads of query and cache spread over
    them, or with a cache and a batch for each. ALiBi slopes are then those of a device's own heads.

    Args:
      query: the new tokens of all sequences, of the cache's dtype.
      cache: holds the keys and values, the new ones included.
      batch: which tokens and blocks belong to which sequence (`make_batch`).
      spec: the formula; static.
      backend: a name never falls back; None takes the first usable one by `registry.ORDER`.
      return_lse: also return the natural log of the sum of exponentials, for `merge_states`.

    Returns:
      out `[num_tokens, num_heads, head_dim]` in the query's dtype; with `return_lse` also lse
      `f32[num_tokens, num_heads]`. A token that sees no key, and a padding token, gets 0 and -inf.

    Raises:
      InvalidInputError: arguments that do not fit together; outside jit also bad values.
      UnsupportedError: the backend cannot honour the call.
      BackendUnavailableError: the backend is unknown or needs a package.

    >>> from pagedattn import init_kv_cache, make_batch, write_kv
    >>> batch = make_batch([3], [0], [[1]], block_size=4)
    >>> kv = jnp.ones((2, 3, 1, 8))
    >>> cache = write_kv(init_kv_cache(2, 4, 1, 8, jnp.float32), *kv, batch.slot_mapping)
    >>> paged_attention(jnp.ones((3, 2, 8)), cache, batch, backend="xla").shape
    (3, 2, 8)
    """
    validate.options(backend, return_lse)
    validate.attention(query, cache, batch, spec)
    query, cache = jax.tree.map(jnp.asarray, (query, cache))
    batch = as_int32(batch)
    arrays = (query, cache, batch)
    call = (*varying(arrays, axes_of(arrays)), spec, return_lse)
    out, lse = dispatch.select(backend, call).run(*call)
    return (out, lse) if return_lse else out


@takes_any_array
def ragged_attention(
    query: Float[Array, "num_tokens num_heads head_dim"],
    key: Float[Array, "num_keys num_kv_heads head_dim"],
    value: Float[Array, "num_keys num_kv_heads head_dim"],
    query_start_loc: Int[Array, "num_seqs_plus_1"],
    key_start_loc: Int[Array, "num_seqs_plus_1"],
    spec: AttentionSpec = AttentionSpec(),
    *,
    max_query_len: int,
    max_key_len: int,
    backend: str | None = None,
    return_lse: bool = False,
):
    """Attention of packed queries over packed keys, without a cache (encoders, profiling runs).

    Sequence s owns the queries and the keys between its start and the next one's. Queries are
    aligned to the end of the keys, as a chunk is to its context. The rest is `paged_attention`:
    packed keys are a cache of blocks of one token.

    Args:
      max_query_len, max_key_len: static upper bounds on the lengths.

    >>> x = jnp.ones((3, 1, 8))
    >>> starts = jnp.array([0, 1, 3])
    >>> ragged_attention(x, x, x, starts, starts, max_query_len=2, max_key_len=2).shape
    (3, 1, 8)
    """
    max_lens = (max_query_len, max_key_len)
    max_lens = validate.ragged(query, key, value, query_start_loc, key_start_loc, spec, max_lens)
    batch = packed_batch(query.shape[0], query_start_loc, key_start_loc, *max_lens)
    cache = packed_cache(key, value)
    return paged_attention(query, cache, batch, spec, backend=backend, return_lse=return_lse)


def packed_cache(key, value) -> KVCache:
    """Packed keys as blocks of one token; no keys as a block that no sequence owns."""
    if not len(key):
        key = value = jnp.zeros((1, *key.shape[1:]), key.dtype)
    return KVCache(key[:, None], value[:, None])


def packed_batch(num_tokens, query_start_loc, key_start_loc, max_query_len, max_key_len):
    """Packed keys as a batch over blocks of one token."""
    query_start_loc, key_start_loc = rising(query_start_loc), rising(key_start_loc)
    key_lens = key_start_loc[1:] - key_start_loc[:-1]
    offsets = jnp.arange(max_key_len, dtype=jnp.int32)
    return BatchMetadata(
        block_tables=key_start_loc[:-1, None] + offsets,
        seq_lens=key_lens,
        query_start_loc=query_start_loc,
        slot_mapping=jnp.full(num_tokens, -1, jnp.int32),
        positions=positions(query_start_loc, key_lens, num_tokens),
        block_size=1,
        max_query_len=max_query_len,
    )
