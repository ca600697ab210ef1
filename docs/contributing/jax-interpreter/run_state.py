"""pl.run_state with an accumulator has no rule; it awaits all products before it returns."""

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

    zeros = plgpu.layout_cast(jnp.zeros((64, 64), jnp.float32), plgpu.Layout.WGMMA)
    out[...] = pl.run_state(product)(plgpu.ACC.init(zeros))


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
    scratch_types=[plgpu.SMEM((64, 64), BF16)] * 2,
    interpret=plgpu.InterpretGPUParams(),
)
assert (run() == 64).all()
# It ends with: rule for primitive 'wgmma' not found
