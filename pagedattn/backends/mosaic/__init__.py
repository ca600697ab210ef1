"""Paged attention on Hopper GPUs, in Pallas Mosaic GPU: JAX and nothing else.

A kernel for caches of keys and values, three for latent caches. Pages are loaded by TMA, one load a
page, so that a cache in blocks of 16 costs what one in a row does.
"""

from ..._dispatch.backend import Backend
from ..gradient import with_xla_gradient
from .dense import launch
from .latents import launch as latents


def _kernel(call):
    return latents if call.value_dim else launch


BACKEND = Backend(
    "mosaic",
    launch.SUPPORTS | {"value_dim"},
    with_xla_gradient(lambda call, *arrays: _kernel(call).run(call, *arrays)),
    lambda call: _kernel(call).refusals(call),
    lambda call: _kernel(call).slower_because(call),
)
