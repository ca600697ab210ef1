"""Torch functions as JAX functions, called by XLA itself: inside jit and scan, without copies."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import torch
from torch.utils.dlpack import from_dlpack

from pagedattn import BackendUnavailableError, InvalidInputError
from pagedattn.tracing import axes_of, varying

try:
    import jax_tvm_ffi
    import tvm_ffi
except ImportError as error:
    raise BackendUnavailableError(
        "calling torch inside jax.jit needs jax-tvm-ffi, which is not installed: "
        "pip install 'pagedattn[torch]'"
    ) from error

_ids = itertools.count()


def torch_call(
    fn: Callable,
    out: jax.ShapeDtypeStruct | Sequence[jax.ShapeDtypeStruct],
    *,
    aliases: Mapping[int, int] | None = None,
    capturable: bool = False,
) -> Callable:
    """A torch function as a JAX function, usable inside jit, scan and (sequentially) vmap.

    XLA hands its buffers to `fn` as tensors by DLPack: inputs are not copied, and must not be
    written unless aliased. What `fn` returns is copied into XLA's output buffers.

    Args:
      fn: takes one tensor for each array argument; returns a tensor, or a tuple or list of them,
        of the shapes and dtypes of `out`. Runs without gradients, on XLA's stream. It must keep
        no argument: the memory is XLA's, and may be another array's after the call.
      out: shape and dtype of each result; a sequence makes the JAX function return a tuple.
      aliases: `{argument: result}`, the buffers that are updated in place: `fn` writes into the
        argument and returns it (or None, when every result is aliased). XLA copies the argument
        first, unless an enclosing jit donates it.
      capturable: let XLA capture the launches into a CUDA graph and replay them without calling
        Python again, while its buffers lie where they did in one of its last captures. Then `fn`
        must not wait for the device, nor depend on its values, nor write to memory of its own that
        torch may free. Temporaries are safe: what `fn` allocates while it is captured comes from
        memory that is kept for as long as the process lives, since the graph goes on writing
        there. One such function serves one captured call at a time.

    Raises:
      InvalidInputError: inside, `fn` returned something else than `out`; what `fn` itself raises
        comes back as `jax.errors.JaxRuntimeError` with its message.

    >>> import jax.numpy as jnp
    >>> twice = torch_call(lambda x: x * 2, jax.ShapeDtypeStruct((3,), jnp.float32))
    >>> jax.jit(twice)(jnp.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]
    """
    outs = tuple(out) if isinstance(out, Sequence) else (out,)
    aliases = dict(aliases or {})
    in_place = set(aliases.values()) == set(range(len(outs)))
    target = _target(fn, len(outs), in_place, capturable)
    call = jax.ffi.ffi_call(target, outs, input_output_aliases=aliases, vmap_method="sequential")

    def called(*arrays):
        results = varying(call(*arrays), axes_of(arrays))
        return tuple(results) if isinstance(out, Sequence) else results[0]

    return called


@functools.cache
def _target(fn, num_outs, in_place, capturable) -> str:
    """Registers fn with XLA, once; a registration lives as long as the process."""
    name = f"pagedattn_torch_call_{next(_ids)}_{getattr(fn, '__name__', 'fn')}"
    pools = {} if capturable else None
    callback = tvm_ffi.convert(functools.partial(_enter, fn, num_outs, in_place, pools))
    jax_tvm_ffi.register_ffi_target(name, callback, platform="cpu", pass_owned_tensor=True)
    jax_tvm_ffi.register_ffi_target(
        name, callback, platform="gpu", pass_owned_tensor=True, allow_cuda_graph=capturable
    )
    return name


def _enter(fn, num_outs, in_place, pools, *buffers):
    """Runs fn on XLA's buffers, arguments first and results last, on XLA's stream."""
    # A capsule saves torch the look at the buffer's device: a quarter of the cost of a call.
    tensors = [from_dlpack(buffer.__dlpack__()) for buffer in buffers]
    device = tensors[-1].device
    with contextlib.nullcontext() if device.type == "cpu" else _xla_stream(device, pools):
        _run(fn, tensors[:-num_outs], tensors[-num_outs:], in_place)


@contextlib.contextmanager
def _xla_stream(device, pools):
    raw = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device.index))
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(raw, device)):
        if pools is None or not torch.cuda.is_current_stream_capturing():
            yield
        else:
            with _kept_memory(device, pools):
                yield


def _kept_memory(device, pools):
    """Makes torch allocate from memory of this function on this device, which is never given back.

    XLA replays what is captured now without telling us. In torch's common memory, a temporary that
    is free again after this call would be handed to others while every replay writes to it.
    """
    if device.index not in pools:
        pools[device.index] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(pools[device.index], device)


def _run(fn, arguments, outs, in_place):
    with torch.no_grad():
        results = fn(*arguments)
        if results is None and in_place:
            return
        results = list(results) if isinstance(results, tuple | list) else [results]
        _check(fn, outs, results)
        if len(outs) > 1 or in_place:
            results = _apart(results, outs)
        for result, out in zip(results, outs, strict=True):
            if not _same(result, out):
                out.copy_(result)


def _apart(results, outs):
    """Results that lie in the memory of any but are not it, copied before it is overwritten."""
    owned = {out.untyped_storage().data_ptr() for out in outs}
    return [
        result
        if _same(result, out) or result.untyped_storage().data_ptr() not in owned
        else result.clone()
        for result, out in zip(results, outs, strict=True)
    ]


def _same(result, out) -> bool:
    return result.data_ptr() == out.data_ptr() and result.stride() == out.stride()


def _check(fn, outs, results):
    if len(results) == len(outs) and all(map(_alike, results, outs)):
        return
    expected, got = (", ".join(map(_describe, tensors)) for tensors in (outs, results))
    raise InvalidInputError(f"torch_call of {fn!r} expects results {expected}, got {got}")


def _alike(result, out) -> bool:
    tensor = isinstance(result, torch.Tensor)
    return tensor and result.shape == out.shape and result.dtype == out.dtype


def _describe(result) -> str:
    if not isinstance(result, torch.Tensor):
        return type(result).__name__
    return f"{result.dtype}{list(result.shape)}"
