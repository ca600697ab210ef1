"""pl.get_global of semaphores, and their signals, have no rules."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def kernel(out):
    there = pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))

    @pl.when(lax.axis_index("program") == 0)
    def first():
        out[...] = jnp.ones((128,), jnp.float32)
        plgpu.semaphore_signal(there.at[0])

    @pl.when(lax.axis_index("program") == 1)
    def second():
        plgpu.semaphore_wait(there.at[0])
        out[...] = 2 * out[...]


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    grid=(2,),
    grid_names=("program",),
    interpret=plgpu.InterpretGPUParams(detect_races=True),
)
assert (run() == 2).all()
# It ends with: No ir_type_handler
