"""Functions that torch.compile calls as they are, and that nothing else may trace or transform."""

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

from pagedattn import UnsupportedError

Fn = TypeVar("Fn", bound=Callable[..., Any])
REASON = "pagedattn calls kernels that cannot be traced"


def uncompiled(fn: Fn) -> Fn:
    """Makes torch.compile call a function, where it would trace what is inside.

    Kernels that are given addresses cannot be traced, and a plan would be traced anew for other
    lengths. With fullgraph=True torch.compile refuses such a function; `require_eager` refuses all
    that would record it as it is.
    """
    disabled: Any = None

    def eager(*args, **kwargs):
        require_eager()
        return fn(*args, **kwargs)

    @functools.wraps(fn)
    def call(*args, **kwargs):
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:  # nothing is compiled; to load it takes seconds
            require_eager()
            return fn(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(eager, reason=REASON)
        return disabled(*args, **kwargs)

    return cast(Fn, call)


def require_eager() -> None:
    """Refuses to run inside what records or replaces torch's operations: kernels are none of them.

    Raises:
      UnsupportedError: inside torch.jit.trace, or a transform of torch.func.
    """
    if torch._C._get_tracing_state() is not None:
        raise UnsupportedError(
            "torch.jit.trace would keep the lengths and results of this one call: call it outside; "
            "torch.compile leaves it out by itself"
        )
    # A module that torch makes when it starts.
    stack = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore[reportAttributeAccessIssue]
    if stack is not None:
        raise UnsupportedError(
            "torch.func's transforms (vmap, grad, jvp, functionalize) cannot look into kernels, "
            "which have neither gradients nor batching rules there: call it outside of them; one "
            "call takes many sequences, and pagedattn has gradients in JAX"
        )


def require_unrecorded() -> None:
    """Refuses what torch's make_fx cannot record: its graph would lack a kernel, in silence."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")
    if proxies is not None and proxies.get_proxy_mode() is not None:
        raise UnsupportedError(
            "make_fx records torch's operations, and this call runs a kernel or reads what they "
            "give: call it outside"
        )
