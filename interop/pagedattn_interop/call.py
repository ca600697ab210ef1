"""Torch functions as JAX functions, called by XLA itself: inside jit and scan, without copies."""

import contextlib
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from torch.utils.dlpack import from_dlpack

from pagedattn import BackendUnavailableError
from pagedattn._arrays.checks import flag
from pagedattn._arrays.shard_map import axes_of, varying

try:
    import jax_tvm_ffi
    import tvm_ffi
except ImportError as error:
    raise BackendUnavailableError(
        "calling torch inside jax.jit needs jax-tvm-ffi, which is not installed: "
        "pip install 'pagedattn[torch]'"
    ) from error

from . import checks, ending
from .failure import CallError, text_of
from .functions import Form, Function, function_of, hold, named
from .results import run
from .stream import xla_stream

TARGET, CAPTURED = "pagedattn_torch_call", "pagedattn_torch_call_captured"


@runtime_checkable
class ShapeAndDtype(Protocol):
    """What a result is like: `jax.ShapeDtypeStruct`, or an array, torch's too."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def torch_call(
    fn: Callable[..., Any],
    out: ShapeAndDtype | Sequence[ShapeAndDtype],
    *,
    aliases: Mapping[int, int] | None = None,
    capturable: bool = False,
    takes_out: bool = False,
) -> Callable[..., Any]:
    """A torch function as a JAX function, usable inside jit, scan and (sequentially) vmap.

    XLA hands its buffers to `fn` as tensors by DLPack: inputs are not copied, and must not be
    written unless aliased. What `fn` returns is copied into XLA's output buffers, unless it writes
    there itself: `takes_out`.

    `fn` is kept alive by the JAX function, and by compiled programs that call it (JAX keeps these
    until `jax.clear_caches()`). Equal functions are taken for one, as static arguments are. A
    program that is saved and loaded elsewhere calls its own function there, or raises an error.

    Args:
      fn: takes one tensor for each array argument; returns a tensor, or a tuple or list of them,
        of the shapes and dtypes of `out`. Runs without gradients and autocast, on XLA's stream.
        It must keep no argument: the memory is XLA's, and may be another array's after the call.
      out: shape and dtype of each result; a sequence makes the JAX function return a tuple.
      aliases: `{argument: result}`, the buffers that are updated in place: `fn` writes into the
        argument and returns it (or None, when every result is aliased). XLA copies the argument
        first, unless an enclosing jit donates it.
      capturable: let XLA capture the launches of `fn` into a CUDA graph, and replay that graph
        without calling Python, as long as its buffers are where they were in a recent capture. `fn`
        must then not wait for the device, not depend on values there, and not write to memory of
        its own that torch may free. Temporaries are safe: replays go on writing to them, so memory
        that `fn` allocates during a capture is kept as long as `fn`. A function may be in only one
        captured call at a time.
      takes_out: `fn` takes the keyword `out`, as torch's own functions do: XLA's output buffers, a
        tensor, or a tuple of them if `out` here is a sequence. It writes all of them, and returns
        them or None; they hold anything before, and what it returns from elsewhere is copied there.
        It must write to no other memory, and cannot resize them.

    Raises:
      InvalidInputError: `fn` cannot be called or hashed; `out` has no shapes and dtypes; aliases or
        arguments do not fit.
      jax.errors.JaxRuntimeError: when it runs, `fn` raised, or returned something else than `out`;
        the text is the traceback.

    >>> import jax.numpy as jnp
    >>> twice = torch_call(lambda x: x * 2, jax.ShapeDtypeStruct((3,), jnp.float32))
    >>> jax.jit(twice)(jnp.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]
    >>> import torch
    >>> add = torch_call(torch.add, jax.ShapeDtypeStruct((3,), jnp.float32), takes_out=True)
    >>> add(jnp.arange(3.0), jnp.ones(3)).tolist()
    [1.0, 2.0, 3.0]
    """
    flag("capturable", capturable)
    flag("takes_out", takes_out)
    single, outs = not isinstance(out, Sequence), checks.results(out)
    in_place = checks.aliases(aliases, len(outs))
    writes = takes_out or set(in_place.values()) == set(range(len(outs)))
    function = function_of(fn, Form(len(outs), takes_out, single, writes, capturable))
    target = CAPTURED if capturable else TARGET
    call = jax.ffi.ffi_call(target, outs, input_output_aliases=in_place, vmap_method="sequential")

    def called(*arrays):
        checks.arguments(arrays, outs, in_place)
        results = hold(call(*arrays, function=function), function)
        results = varying(results, axes_of(arrays))
        return results[0] if single else tuple(results)

    return called


def _enter(name: str, *buffers):
    """XLA calls this: runs the function called `name` on XLA's buffers, arguments then results."""
    ending.begin_call()
    num_modules = len(sys.modules)
    try:
        _call(named(name), buffers)
    except BaseException as error:  # XLA can report nothing else than a CallError's text
        text = text_of(error)
    else:
        if len(sys.modules) != num_modules:
            # What is tried while modules are imported leaves cycles of exceptions and frames, which
            # hold the tensors of this call: tvm-ffi would take them for leaked.
            gc.collect()
        return
    finally:
        ending.end_call()
    raise CallError(text)


def _call(function: Function, buffers):
    # Given a capsule, torch need not ask for the buffer's device: a quarter of the cost of a call.
    tensors = [from_dlpack(buffer.__dlpack__()) for buffer in buffers]
    num_outs = function.form.num_outs
    arguments, outs = tensors[:-num_outs], tensors[-num_outs:]
    device = outs[0].device
    on_stream = device.type != "cpu"
    with xla_stream(device, function.pools) if on_stream else contextlib.nullcontext():
        run(function, arguments, outs)


def _register(target, **options):
    # One target serves all functions: a process can have 1024 targets, and none is ever freed.
    callback = tvm_ffi.convert(_enter)
    specification = ["attrs.function", "args", "rets"]
    options |= {"arg_spec": specification, "pass_owned_tensor": True}
    jax_tvm_ffi.register_ffi_target(target, callback, platform="gpu", **options)
    options.pop("allow_cuda_graph", None)
    jax_tvm_ffi.register_ffi_target(target, callback, platform="cpu", **options)


_register(TARGET)
_register(CAPTURED, allow_cuda_graph=True)
