"""The two entry points of pagedattn on torch tensors."""

from typing import Any, cast

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from pagedattn import AttentionSpec, Backend, BatchMetadata, Crossings, KVCache, Selection
from pagedattn._dispatch import select, validate
from pagedattn._dispatch.crossings import require_crossings
from pagedattn._dispatch.options import given_of
from pagedattn._dispatch.registry import Framework
from pagedattn._dispatch.signatures import (
    PagedAttention,
    RaggedAttention,
    lists_arrays,
    typed_as,
    without_other_names,
)
from pagedattn.batch.packed import packed_batch, packed_cache

from .arrays import (
    int32,
    nondecreasing,
    on_device_of,
    require_beside,
    require_tensors,
    tensor,
    with_dense_rows,
)
from .step import Lse, Out, Query, computed, described, prepared
from .uncompiled import uncompiled

Keys = Float[Tensor, "num_keys num_kv_heads head_dim"]
Values = Float[Tensor, "num_keys num_kv_heads value_dim"]
Starts = Integer[Any, "num_seqs_plus_1"]
Sinks = Float[Tensor, "num_heads"]
Bias = Float[Tensor, "num_tokens heads max_keys"]
Parents = Integer[Any, "num_tokens"]


@typed_as(PagedAttention[Tensor])
@uncompiled
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
    """`pagedattn.paged_attention` on torch tensors; the batch may hold arrays of any framework.

    Values of the batch are checked if they are on the CPU. On a GPU they are not read, since that
    would wait for it; wrong ids there never lead outside the cache. Not differentiable. Kernels
    start on the tensors' device, whichever device is current. For several layers of one step, call
    `prepare` once instead.

    Arguments are those of `pagedattn.paged_attention`; query, cache, sinks, bias and a selection's
    blocks are tensors on one device.

    Returns:
      out `[num_tokens, num_heads, value_dim]` in the query's dtype; with `return_lse` also lse
      `f32[num_tokens, num_heads]`.

    Raises:
      InvalidInputError, UnsupportedError, BackendUnavailableError: as the JAX function; also
        UnsupportedError for tensors that require gradients.

    >>> import torch
    >>> from pagedattn import make_batch
    >>> cache = KVCache(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8))
    >>> batch = make_batch([1], [4], [[1, 0]], block_size=4)
    >>> paged_attention(torch.ones(1, 2, 8), cache, batch).shape
    torch.Size([1, 2, 8])
    """
    given = given_of({"sinks": sinks, "bias": bias, "selection": selection})
    flags = return_lse, batch_invariant
    step, query = prepared(query, cache, batch, spec, backend, flags, given)
    with torch.no_grad():
        out, lse = computed(step, query, cache, given)
    return (out, cast(Tensor, lse)) if return_lse else out


@uncompiled
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
    **arrays: Tensor | Selection | None,
) -> select.Explanation:
    """Why each torch backend can or cannot run a call, as `pagedattn.explain`.

    Raises:
      InvalidInputError, UnsupportedError: no backend could run it, as in `paged_attention`.

    >>> import torch
    >>> from pagedattn import make_batch
    >>> cache = KVCache(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8))
    >>> batch = make_batch([1], [4], [[1, 0]], block_size=4)
    >>> explain(torch.ones(1, 2, 8), cache, batch)["sdpa"]
    []
    """
    flags = return_lse, batch_invariant
    call, *_ = described(query, cache, batch, spec, flags, given_of(arrays))
    with on_device_of(query):
        return select.explain(call, Framework.TORCH, crossings)


@uncompiled
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
    **arrays: Tensor | Selection | None,
) -> str:
    """The name of the backend that `backend=None` takes for a call.

    Raises:
      InvalidInputError, UnsupportedError: as `pagedattn.select_backend`.

    >>> import torch
    >>> from pagedattn import make_batch
    >>> cache = KVCache(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8))
    >>> batch = make_batch([1], [4], [[1, 0]], block_size=4)
    >>> select_backend(torch.ones(1, 2, 8), cache, batch) in ("numba", "sdpa")
    True
    """
    flags = return_lse, batch_invariant
    call, *_ = described(query, cache, batch, spec, flags, given_of(arrays))
    require_crossings(crossings)
    with on_device_of(query):
        return select.select(crossings, call, Framework.TORCH).name


@typed_as(RaggedAttention[Tensor, Starts])
@uncompiled
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
    """`pagedattn.ragged_attention` on torch tensors: the same arguments, results and errors.

    >>> import torch
    >>> x, starts = torch.ones(3, 1, 8), torch.tensor([0, 1, 3])
    >>> ragged_attention(x, x, x, starts, starts, max_query_len=2, max_key_len=2).shape
    torch.Size([3, 1, 8])
    """
    require_tensors(query=query, key=key, value=value)
    require_beside("query", query, key=key, value=value)
    query_start_loc = int32(tensor("query_start_loc", query_start_loc, query.device))
    key_start_loc = int32(tensor("key_start_loc", key_start_loc, query.device))
    max_lens = (max_query_len, max_key_len)
    max_lens = validate.ragged(query, key, value, query_start_loc, key_start_loc, spec, max_lens)
    starts = nondecreasing(query_start_loc), nondecreasing(key_start_loc)
    if parents is not None:
        parents = int32(tensor("parents", parents, query.device))
        validate.parents(parents, query, starts[0])
    batch = packed_batch(query.shape[0], *starts, *max_lens, parents)
    cache = packed_cache(with_dense_rows(key), with_dense_rows(value))
    flags = {"return_lse": return_lse, "batch_invariant": batch_invariant}
    options = {"backend": backend, "sinks": sinks, "bias": bias, "selection": selection, **flags}
    return paged_attention(query, cache, batch, spec, **options)
