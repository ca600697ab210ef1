"""Functions that torch.compile calls as they are."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

Fn = TypeVar("Fn", bound=Callable[..., Any])
REASON = "pagedattn calls kernels that cannot be traced"


def uncompiled(fn: Fn) -> Fn:
    """Makes torch.compile call a function, where it would trace what is inside.

    Kernels that are given addresses cannot be traced, and a plan would be traced anew for other
    lengths. With fullgraph=True torch.compile refuses such a function.
    """
    disabled: Any = None

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:  # nothing is compiled; to load it takes seconds
            return fn(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(fn, reason=REASON)
        return disabled(*args, **kwargs)

    return cast(Fn, call)
