"""Arrays in a warpgroup's registers: a row of a tile, or a key of a step, to each element."""

import inspect

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from .kernel_config import WARPGROUP, KernelConfig

LAYOUT = plgpu.Layout.WGMMA
# Numbers of eight bits: sixteen threads have 128 columns of a row. When these are read, and when
# they are written as 16 bits, no two threads meet in a bank.
NUMBERS = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 128), (2, 128), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)
# JAX 0.10 must be given an index to load all of a reference, 0.11 warns of any, 0.12 takes none.
INDEX = inspect.signature(plgpu.load).parameters.get("idx")
ALL = ((),) if INDEX and INDEX.default is INDEX.empty else ()
STORE = getattr(plgpu, "store", None)  # JAX 0.12 has it


def row_vector(value, dtype=jnp.float32):
    return plgpu.layout_cast(jnp.full((WARPGROUP,), value, dtype), LAYOUT.reduce(1))


def columns(config: KernelConfig):
    size = (WARPGROUP, config.keys)
    return plgpu.broadcasted_iota(jnp.int32, size, 1, layout=LAYOUT)


def wide(rows, like):
    """One value for each row, or for all, as a matrix."""
    if not jnp.ndim(rows):
        return rows
    return lax.broadcast_in_dim(rows, like.shape, [0])


def along_columns(keys, like):
    """One value for each key, as a matrix."""
    return lax.broadcast_in_dim(keys, like.shape, [1])


def load(ref, layout):
    return plgpu.load(ref, *ALL, layout=layout, optimized=False)


def store(ref, value):
    """Stores a few numbers, too: JAX 0.12 refuses what does not fill lines of 128 bytes."""
    if STORE:
        STORE(ref, value, optimized=False)
    else:
        ref[...] = value
