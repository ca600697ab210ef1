"""Runs a torch function and puts what it returns into XLA's output buffers."""

import torch

from pagedattn import InvalidInputError


def run(fn, arguments, outs, in_place):
    """Runs fn and fills `outs`; if `in_place`, fn may have written to all of them itself."""
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
    """The results; those that share memory with an out that they do not fill are copied first."""
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
