"""Gradients for backends whose kernels have none."""

from typing import Any

import jax

from .._dispatch import emulate
from .._dispatch.backend import Run
from ..batch.metadata import Sequences, nondecreasing_starts
from ..errors import InvalidInputError
from . import xla


def with_xla_gradient(run: Run) -> Run:
    """A backend's `run` with a backward pass, which recomputes the attention by `xla`.

    The plan must be the batch, `Sequences` or a subclass that holds more: xla attends to it.

    Raises:
      InvalidInputError: when the result runs with another plan.

    >>> def run(call, query, cache, batch):  # by a kernel without gradients
    ...     return jax.lax.stop_gradient(query), None
    >>> differentiable = with_xla_gradient(run)
    """

    def differentiable(call, query, cache, batch: Any, /, **options):
        if not isinstance(batch, Sequences):
            raise InvalidInputError(
                "with_xla_gradient needs a plan that is the batch: Sequences, or a subclass with "
                f"what else the backend's plan works out, got {type(batch).__name__}"
            )
        results = slice(2 if call.return_lse else 1)

        @jax.custom_vjp
        def attend(query, cache, options, batch):
            return run(call, query, cache, batch, **options)[results]

        def forward(*arrays):
            return attend(*arrays), arrays

        def backward(arrays, cotangents):
            *differentiated, batch = arrays
            plan, live = nondecreasing_starts(batch), emulate.live_tokens(call, batch)

            def replay(query, cache, options):
                replayed = emulate.attend(xla.BACKEND, call, query, cache, plan, live, options)
                return replayed[results]

            return (*jax.vjp(replay, *differentiated)[1](cotangents), None)

        attend.defvjp(forward, backward)
        out, *lse = attend(query, cache, options, batch)
        return out, lse[0] if lse else None

    return differentiable
