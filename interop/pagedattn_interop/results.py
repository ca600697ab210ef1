"""Runs a torch function and puts what it returns into XLA's output buffers."""

import contextlib

import torch

from pagedattn import InvalidInputError
from pagedattn._arrays.memory import require_memory
from pagedattn_torch.arrays import without_autocast

from .functions import Form, Function


def run(function: Function, arguments, outs):
    """Runs a function and fills `outs`, where it has not written to them itself."""
    fn, form = function.fn, function.form
    # XLA calls on the caller's thread, or on one of its own.
    with torch.no_grad(), _without_autocast([*outs, *arguments]):
        results = fn(*arguments, **_given(form, outs))
        if results is None and form.writes:
            return
        results = list(results) if isinstance(results, tuple | list) else [results]
        _check(fn, outs, results)
        for result in results:
            require_memory("a result of torch_call", result)
        if len(outs) > 1 or form.writes:
            results = _apart(results, outs)
        for result, out in zip(results, outs, strict=True):
            if not _same(result, out):
                out.copy_(result)


def _without_autocast(tensors):
    return without_autocast(tensors[0].device) if tensors else contextlib.nullcontext()


def _given(form: Form, outs):
    if not form.takes_out:
        return {}
    return {"out": outs[0] if form.single else tuple(outs)}


def _apart(results, outs):
    """The results; those that share memory with an out that they do not fill are copied first."""
    owned = {out.untyped_storage().data_ptr() for out in outs}
    return [
        result
        if _same(result, out) or result.untyped_storage().data_ptr() not in owned
        else result.clone()
        for result, out in zip(results, outs, strict=True)
    ]


def _same(result, out) -> bool:
    """Whether a result is what lies in `out`: not its negative, which torch may leave undone."""
    lies_there = result.data_ptr() == out.data_ptr() and result.stride() == out.stride()
    return lies_there and not result.is_neg()


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
