"""Gradients for backends whose kernels have none."""

from collections.abc import Callable

import jax

from .._dispatch import emulate
from ..batch.metadata import nondecreasing_starts
from . import xla


def with_xla_gradient(run: Callable) -> Callable:
    """A backend's `run` with a backward pass, which recomputes the attention by `xla`."""

    def differentiable(call, query, cache, batch, **options):
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
