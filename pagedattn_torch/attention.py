"""The two entry points of pagedattn on torch tensors."""

import dataclasses
import functools
import importlib

import jax
import torch
from jaxtyping import Float, Int
from torch import Tensor

from pagedattn import (
    AttentionSpec,
    BackendUnavailableError,
    BatchMetadata,
    KVCache,
    validate,
)
from pagedattn import backend as backends
from pagedattn.checks import require

from .arrays import (
    batch_on,
    device_of,
    int32,
    require_cache,
    require_no_grad,
    require_tensors,
    rising,
    tensor,
)
from .lengths import token_positions

# Every torch backend, and those of which `backend=None` takes the first usable one by device.
NAMES = ("triton", "xformers", "sdpa", "ipex")
ORDER = {"cuda": ("triton", "xformers", "sdpa")}


def paged_attention(
    query: Float[Tensor, "num_tokens num_heads head_dim"],
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    *,
    backend: str | None = None,
    return_lse: bool = False,
):
    """`pagedattn.paged_attention` on torch tensors; the batch may hold arrays of any framework.

    Values of the batch are checked where they lie on the CPU; elsewhere they are not read, and ids
    out of range read nothing outside the cache. Not differentiable. Kernels start on the tensors'
    device, whichever is current.

    Returns:
      out like query; with `return_lse` also lse `f32[num_tokens, num_heads]`.

    Raises:
      InvalidInputError, UnsupportedError, BackendUnavailableError: as the JAX function; tensors
        that require gradients are unsupported too.

    >>> from pagedattn import make_batch
    >>> cache = KVCache(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8))
    >>> batch = make_batch([1], [4], [[1, 0]], block_size=4)
    >>> paged_attention(torch.ones(1, 2, 8), cache, batch).shape
    torch.Size([1, 2, 8])
    """
    out, lse = prepared(query, cache, batch, spec, backend=backend, return_lse=return_lse)()
    return (out, lse) if return_lse else out


def prepared(query, cache, batch, spec, *, backend: str | None, return_lse: bool = False):
    """A call that is known to be valid and supported, to be run: whoever writes the cache in place
    between the two leaves it untouched when the call is refused.
    """
    validate.options(backend, return_lse)
    call = _call(query, cache, batch, spec, return_lse)
    with device_of(query):
        if backend is None:
            chosen = backends.choose(load, ORDER.get(query.device.type, ("sdpa",)), call)
        else:
            chosen = backends.require(load, backend, call)
    foreign = any(not isinstance(leaf, Tensor) for leaf in jax.tree.leaves(batch))
    return functools.partial(_run, chosen, call, wait=foreign and query.is_cuda)


@torch.no_grad()
def _run(backend, call, *, wait: bool):
    with device_of(call[0]):  # Triton's and xFormers' kernels start on the current device
        results = backend.run(*call)
    if wait:
        # Whoever owns the batch's memory may free it as soon as the caller drops the batch, and
        # does not know that torch's kernels still read it.
        torch.cuda.current_stream(call[0].device).synchronize()
    return results


def explain(query, cache, batch, spec=AttentionSpec(), *, return_lse=False) -> dict[str, list[str]]:
    """Why each torch backend can or cannot run a call: an empty list means it can.

    >>> from pagedattn import make_batch
    >>> cache = KVCache(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8))
    >>> batch = make_batch([1], [4], [[1, 0]], block_size=4)
    >>> explain(torch.ones(1, 2, 8), cache, batch)["sdpa"]
    []
    """
    validate.options(return_lse=return_lse)
    call = _call(query, cache, batch, spec, return_lse)
    with device_of(query):
        return {name: backends.why_not(load, name, call) for name in NAMES}


def ragged_attention(
    query: Float[Tensor, "num_tokens num_heads head_dim"],
    key: Float[Tensor, "num_keys num_kv_heads head_dim"],
    value: Float[Tensor, "num_keys num_kv_heads head_dim"],
    query_start_loc: Int[Tensor, "num_seqs_plus_1"],
    key_start_loc: Int[Tensor, "num_seqs_plus_1"],
    spec: AttentionSpec = AttentionSpec(),
    *,
    max_query_len: int,
    max_key_len: int,
    backend: str | None = None,
    return_lse: bool = False,
):
    """`pagedattn.ragged_attention` on torch tensors.

    >>> x, starts = torch.ones(3, 1, 8), torch.tensor([0, 1, 3])
    >>> ragged_attention(x, x, x, starts, starts, max_query_len=2, max_key_len=2).shape
    torch.Size([3, 1, 8])
    """
    require_tensors(query=query, key=key, value=value)
    query_start_loc = int32(tensor("query_start_loc", query_start_loc, query.device))
    key_start_loc = int32(tensor("key_start_loc", key_start_loc, query.device))
    max_lens = (max_query_len, max_key_len)
    max_lens = validate.ragged(query, key, value, query_start_loc, key_start_loc, spec, max_lens)
    starts = rising(query_start_loc), rising(key_start_loc)
    batch = packed_batch(query.shape[0], *starts, *max_lens)
    cache = packed_cache(key, value)
    return paged_attention(query, cache, batch, spec, backend=backend, return_lse=return_lse)


def packed_cache(key, value) -> KVCache:
    """Packed keys as blocks of one token; no keys as a block that no sequence owns."""
    if not len(key):
        key = value = key.new_zeros(1, *key.shape[1:])
    return KVCache(key[:, None], value[:, None])


def packed_batch(num_tokens, query_start_loc, key_start_loc, max_query_len, max_key_len):
    """Packed keys as a batch over blocks of one token."""
    device = key_start_loc.device
    key_lens = key_start_loc.diff()
    return BatchMetadata(
        block_tables=key_start_loc[:-1, None] + torch.arange(max_key_len, device=device),
        seq_lens=key_lens,
        query_start_loc=query_start_loc,
        slot_mapping=torch.full((num_tokens,), -1, device=device),
        positions=token_positions(query_start_loc, key_lens, num_tokens),
        block_size=1,
        max_query_len=max_query_len,
    )


@functools.cache
def load(name: str) -> backends.Backend:
    """The torch backend of a name; its kernels are imported now."""
    if name not in NAMES:
        raise BackendUnavailableError(f"backend must be one of {list(NAMES)}, got {name!r}")
    try:
        return importlib.import_module(f".{name}", __package__).BACKEND
    except ImportError as error:
        raise BackendUnavailableError(
            f"backend {name!r} is not available ({error}): pip install 'pagedattn[{name}]'"
        ) from error


def _call(query, cache, batch, spec, return_lse):
    """The arguments of a backend, validated."""
    require_cache(cache)
    batch_type = type(batch).__name__
    require(isinstance(batch, BatchMetadata), f"batch is no BatchMetadata: {batch_type}")
    tensors = {"query": query, "key": cache.key, "value": cache.value}
    require_tensors(**tensors)
    require_no_grad(*tensors.values())
    batch = batch_on(batch, None)
    validate.attention(query, cache, batch, spec)  # where values on the CPU are known
    batch = batch_on(batch, query.device)
    batch = dataclasses.replace(batch, query_start_loc=rising(batch.query_start_loc))
    return query, cache, batch, spec, return_lse
