"""wgmma takes its left operand from registers on the GPU; the interpreter takes it for a ref."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

BF16 = jnp.bfloat16


def kernel(out, b):
    b[...] = jnp.ones((64, 64), BF16)
    plgpu.commit_smem()
    a = plgpu.layout_cast(jnp.ones((64, 64), BF16), plgpu.Layout.WGMMA)

    def product(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    out[...] = pl.run_scoped(product, plgpu.ACC((64, 64)))


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
    scratch_types=[plgpu.SMEM((64, 64), BF16)],
    interpret=plgpu.InterpretGPUParams(),
)
assert (run() == 64).all()
# It ends with: Expected shape (6,) but got (64, 64)
