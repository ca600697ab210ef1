"""Values of keys that no query sees, which may be anything."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .kernel_config import KEYS
from .softmax import LAYOUT

COLUMNS = 64  # of a view: those of a swizzled tile of 16-bit numbers


def zero(views, visible):
    """Zeros in rows from `visible` on of `[KEYS, COLUMNS]`: a weight of 0 leaves NaN as it is.

    Pages of which no key is seen are zeros: they are loaded from one past the cache.
    """

    @pl.when((visible > 0) & (visible < KEYS))
    def zeros():
        row = plgpu.broadcasted_iota(jnp.int32, (KEYS, COLUMNS), 0, layout=LAYOUT)
        for view in views:
            values = plgpu.layout_cast(view[...], LAYOUT)
            view[...] = jnp.where(row < visible, values, jnp.zeros_like(values))
