"""Which backend runs a call, and why."""

import jax
import jax.numpy as jnp

from . import backend as backends
from . import validate
from .backend import Backend
from .foreign import takes_any_array
from .registry import can_load, load, order_on, platform_of, registered
from .spec import AttentionSpec


def select(backend: str | None, call: tuple) -> Backend:
    """The backend that runs a call `(query, cache, batch, spec, return_lse)`.

    An explicit name never falls back; None takes the first usable by `registry.ORDER`.
    """
    if backend is not None:
        return backends.require(load, backend, call)
    return backends.choose(load, order_on(platform_of(call[0])), call)


@takes_any_array
def explain(query, cache, batch, spec=AttentionSpec(), *, return_lse=False) -> dict[str, list[str]]:
    """Why each registered backend can or cannot run a call: an empty list means it can.

    Raises:
      InvalidInputError: no backend could, since the arguments do not fit together.

    >>> from pagedattn import init_kv_cache, make_batch
    >>> cache, batch = init_kv_cache(1, 4, 1, 8), make_batch([1], [0], [[0]], block_size=4)
    >>> explain(jax.numpy.ones((1, 2, 8), cache.dtype), cache, batch)["xla"]
    []
    """
    validate.options(return_lse=return_lse)
    validate.attention(query, cache, batch, spec)
    query, cache, batch = jax.tree.map(jnp.asarray, (query, cache, batch))
    call = (query, cache, batch, spec, return_lse)
    return {name: backends.why_not(load, name, call) for name in registered()}


def available_backends() -> tuple[str, ...]:
    """The names of the backends whose packages are installed.

    >>> "xla" in available_backends()
    True
    """
    return tuple(name for name in registered() if can_load(name))
