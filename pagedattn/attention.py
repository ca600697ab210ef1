"""The two entry points: attention over a paged cache, and over packed keys without one."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Integer

from ._arrays.devices import on_one_device, require_no_explicit_axes
from ._arrays.dlpack import takes_any_array
from ._arrays.int32 import int32, nondecreasing
from ._arrays.shard_map import varying_alike
from ._dispatch import emulate, select, validate
from ._dispatch.backend import Backend
from ._dispatch.call import call_of
from ._dispatch.crossings import Crossings, require_crossings
from ._dispatch.options import for_backends, given_of, validate_arrays, validate_fit
from ._dispatch.registry import Framework
from ._dispatch.signatures import (
    PagedAttention,
    RaggedAttention,
    lists_arrays,
    typed_as,
    without_other_names,
)
from .batch.metadata import BatchMetadata, sequences_of
from .batch.packed import packed_batch, packed_cache
from .cache.kv_cache import KVCache
from .selection.selection import Selection
from .spec import AttentionSpec

Query = Float[Array, "num_tokens num_heads head_dim"]
Out = Float[Array, "num_tokens num_heads value_dim"]
Keys = Float[Array, "num_keys num_kv_heads head_dim"]
Values = Float[Array, "num_keys num_kv_heads value_dim"]
Lse = Float[Array, "num_tokens num_heads"]
Starts = Integer[Any, "num_seqs_plus_1"] | Sequence[int]
Sinks = Float[Array, "num_heads"]
Bias = Float[Array, "num_tokens heads max_keys"]
Parents = Integer[Any, "num_tokens"] | Sequence[int]


@typed_as(PagedAttention[Array])
@takes_any_array
@on_one_device
@without_other_names
def paged_attention(
    query: Query,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    *,
    backend: str | Backend | Crossings | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    sinks: Sinks | None = None,
    bias: Bias | None = None,
    selection: Selection | None = None,
) -> Out | tuple[Out, Lse]:
    """Attention of packed queries over the blocks of a cache.

    Prefill, chunked prefill, decode and any mix are this one call: write the new keys and values
    with `write_kv` first, then attend. Encoders and cross attention are this call with
    `causal=False` and the key side's own tables and lengths.

    Outside jit the arrays may also be torch's, or any other framework's with DLPack: their memory
    is read without a copy, or an InvalidInputError says why it cannot be.

    Several devices: call it inside `jax.shard_map`, with the heads of query and cache spread over
    them, or with a cache and a batch for each. Sinks and a bias are then those of a device's own
    heads; ALiBi slopes are static, the same for all devices, so give their terms as a bias. Where
    each has some keys of every sequence, `merge_across` joins the results.

    Args:
      query: the new tokens of all sequences, of the cache's dtype.
      cache: holds the keys and values, the new ones included.
      batch: which tokens and blocks belong to which sequence (`make_batch`).
      spec: the formula; static.
      backend: a name or a `Backend`: this one runs, or says why not. None takes the first one that
        can run the call and is likely fast (`explain` says why); `Crossings` do so by other sizes
        than those measured on an H200.
      return_lse: also return the natural log of the sum of exponentials, for `merge_states`.
      batch_invariant: out and lse of a token have the same bits alone and in any batch, in blocks
        of any place and size, as a prompt, in chunks, in a draft or in decode; on one backend and
        kind of device. Backends that do not promise it refuse.
      sinks: a logit for each query head that takes weight and has no value (gpt-oss); -inf is
        none. The lse counts it. To split the keys, give it to one of the parts.
      bias: added to the logits, float32 or of the query's dtype: `[num_tokens, heads, max_keys]`,
        heads being num_heads, or 1 for all of them. Column j is the key at position j of the
        token's sequence; -inf hides it, as the spec may. No sequence has more than max_keys.
      selection: the blocks that each KV head of each sequence attends to (`select_blocks`); their
        keys stand at their true positions. None is all.

    Returns:
      out `[num_tokens, num_heads, value_dim]` in the query's dtype, value_dim being head_dim unless
      the cache has values of another width; with `return_lse` also lse
      `f32[num_tokens, num_heads]`. A token that sees no key gets 0 and -inf, or its head's sink; a
      padding token 0 and -inf.

    Raises:
      InvalidInputError: arguments that do not fit together; outside jit also bad values.
      UnsupportedError: the backend cannot run the call.
      BackendUnavailableError: the backend is unknown or needs a package.

    >>> from pagedattn import init_kv_cache, make_batch, write_kv
    >>> batch = make_batch([3], [0], [[1]], block_size=4)
    >>> kv = jnp.ones((2, 3, 1, 8))
    >>> cache = write_kv(init_kv_cache(2, 4, 1, 8, jnp.float32), *kv, batch.slot_mapping)
    >>> paged_attention(jnp.ones((3, 2, 8)), cache, batch, backend="xla").shape
    (3, 2, 8)
    """
    options = given_of({"sinks": sinks, "bias": bias, "selection": selection})
    call = _call(query, cache, batch, spec, return_lse, batch_invariant, options)
    chosen = select.select(backend, call, Framework.JAX)
    sequences = sequences_of(batch)
    options = for_backends(options, sequences, cache.block_size)
    arrays = varying_alike((query, cache, sequences, options))
    out, lse = _run(_EMPTY if call.is_empty else chosen, call, *arrays)
    return (out, lse) if return_lse else out


def _run(backend: Backend, call, query, cache, batch, options):
    plan, live = backend.plan(backend.native_call(call), batch), emulate.live_tokens(call, batch)
    return emulate.attend(backend, call, query, cache, plan, live, options)


@takes_any_array
@on_one_device
@lists_arrays
def explain(
    query: Query,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    *,
    return_lse: bool = False,
    batch_invariant: bool = False,
    crossings: Crossings = Crossings(),
    **arrays: Array | Selection | None,
) -> select.Explanation:
    """Why each backend can or cannot run a call, and which one `backend=None` takes.

    Args:
      query, cache, batch, spec, return_lse, batch_invariant: as in `paged_attention`.
      crossings: the sizes by which `.choice` is made, as `backend=crossings` would be.
      arrays: its keywords for arrays, `sinks`, `bias` and `selection`.

    Returns:
      a mapping from names to reasons, where no reasons mean that it can; `.choice` is the name of
      the one taken, `.passed_over` says why those before it are not.

    Raises:
      InvalidInputError: the arguments do not fit together, whatever the backend.

    >>> from pagedattn import init_kv_cache, make_batch
    >>> cache, batch = init_kv_cache(1, 4, 1, 8), make_batch([1], [0], [[0]], block_size=4)
    >>> why = explain(jnp.ones((1, 2, 8), cache.dtype), cache, batch)
    >>> why["xla"], why.choice in why
    ([], True)
    """
    call = _call(query, cache, batch, spec, return_lse, batch_invariant, given_of(arrays))
    return select.explain(call, Framework.JAX, crossings)


@takes_any_array
@on_one_device
@lists_arrays
def select_backend(
    query: Query,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    *,
    return_lse: bool = False,
    batch_invariant: bool = False,
    crossings: Crossings = Crossings(),
    **arrays: Array | Selection | None,
) -> str:
    """The name of the backend that `backend=None` takes for a call.

    Args: as of `explain`.

    Raises:
      InvalidInputError: the arguments do not fit together.
      UnsupportedError: no backend can run the call; the text has the reasons.

    >>> from pagedattn import available_backends, init_kv_cache, make_batch
    >>> cache, batch = init_kv_cache(1, 4, 1, 8), make_batch([1], [0], [[0]], block_size=4)
    >>> select_backend(jnp.ones((1, 2, 8), cache.dtype), cache, batch) in available_backends()
    True
    """
    call = _call(query, cache, batch, spec, return_lse, batch_invariant, given_of(arrays))
    require_crossings(crossings)
    return select.select(crossings, call, Framework.JAX).name


def _call(query, cache, batch, spec, return_lse, batch_invariant, options):
    """The call, validated."""
    validate.attention(query, cache, batch, spec, return_lse, batch_invariant)
    require_no_explicit_axes(query=query, cache=cache, batch=batch, **options)
    validate_arrays(options, query)
    validate_fit(options, cache, batch)
    return call_of(query, cache, batch, spec, return_lse, batch_invariant, **options)


def _no_results(call, *_arrays, **_options):
    return jnp.zeros(call.out_shape, call.dtype), jnp.full(call.lse_shape, -jnp.inf, jnp.float32)


# Runs the calls whose shapes leave no query that could see a key.
_EMPTY = Backend("empty", frozenset({"return_lse", "batch_invariant"}), _no_results)


@typed_as(RaggedAttention[Array, Starts])
@takes_any_array
@on_one_device
@without_other_names
def ragged_attention(
    query: Query,
    key: Keys,
    value: Values,
    query_start_loc: Starts,
    key_start_loc: Starts,
    spec: AttentionSpec = AttentionSpec(),
    *,
    max_query_len: int,
    max_key_len: int,
    backend: str | Backend | Crossings | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    sinks: Sinks | None = None,
    bias: Bias | None = None,
    selection: Selection | None = None,
    parents: Parents | None = None,
) -> Out | tuple[Out, Lse]:
    """Attention of packed queries over packed keys, without a cache (encoders, profiling runs).

    Queries are aligned to the end of the keys: the last query of a sequence is at the position of
    its last key. All else is as in `paged_attention`, run over the keys as blocks of one token.

    Args:
      query_start_loc, key_start_loc: sequence s owns the queries, and the keys, from entry s up to
        entry s + 1; those after the last entry are padding.
      max_query_len, max_key_len: static upper bounds on the lengths of the sequences.
      spec, backend, return_lse, batch_invariant, sinks, bias, selection: as in `paged_attention`;
        a selection chooses single keys.
      parents: of draft trees, for each token as in `make_batch`; entries of padding tokens
        may be anything.

    Returns, Raises: as `paged_attention`.

    >>> x = jnp.ones((3, 1, 8))
    >>> starts = jnp.array([0, 1, 3])
    >>> ragged_attention(x, x, x, starts, starts, max_query_len=2, max_key_len=2).shape
    (3, 1, 8)
    """
    max_lens = (max_query_len, max_key_len)
    max_lens = validate.ragged(query, key, value, query_start_loc, key_start_loc, spec, max_lens)
    starts = nondecreasing(query_start_loc), nondecreasing(key_start_loc)
    if parents is not None:
        validate.parents(parents, query, starts[0])
        parents = int32(parents)
    batch = packed_batch(query.shape[0], *starts, *max_lens, parents)
    cache = packed_cache(key, value)
    flags = {"return_lse": return_lse, "batch_invariant": batch_invariant}
    options = {"backend": backend, "sinks": sinks, "bias": bias, "selection": selection, **flags}
    return paged_attention(query, cache, batch, spec, **options)
