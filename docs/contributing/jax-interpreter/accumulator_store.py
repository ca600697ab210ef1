"""A store to an accumulator has no rule: the kernel cannot be interpreted."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def kernel(out):
    def fill(acc):
        acc[...] = jnp.ones((64, 64), jnp.float32)
        return acc[...]

    ones = pl.run_scoped(fill, plgpu.ACC((64, 64)))
    out[...] = ones


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
    interpret=plgpu.InterpretGPUParams(),
)
assert (run() == 1).all()
# It ends with: Accumulator shape (6,) does not match value shape (64, 64)
