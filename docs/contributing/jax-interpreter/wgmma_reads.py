"""An operand is overwritten while its product is in flight: no race is detected."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

BF16 = jnp.bfloat16


def kernel(out, a, b):
    a[...] = b[...] = jnp.ones((64, 64), BF16)
    plgpu.commit_smem()

    def product(acc):
        plgpu.wgmma(acc, a, b)
        b[...] = jnp.zeros((64, 64), BF16)  # not before wgmma_wait(0)
        plgpu.wgmma_wait(0)
        return acc[...]

    out[...] = pl.run_scoped(product, plgpu.ACC((64, 64)))


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
    scratch_types=[plgpu.SMEM((64, 64), BF16)] * 2,
    interpret=plgpu.InterpretGPUParams(detect_races=True),
)
try:
    jax.block_until_ready(run())
except jax.errors.JaxRuntimeError as error:
    if "RACE DETECTED" not in str(error):
        raise
else:
    raise AssertionError("a race, and none is reported")
# It ends with: AssertionError: a race, and none is reported
