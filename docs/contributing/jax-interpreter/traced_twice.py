"""force_gpu_interpret_mode: the first call that follows another one traces the kernel again."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

traced = []


@jax.jit
def run():
    traced.append(1)
    shape = jax.ShapeDtypeStruct((128,), jnp.float32)

    def kernel(out):
        out[...] = jnp.ones((128,), jnp.float32)

    return plgpu.kernel(kernel, out_type=shape)()


mode = plgpu.InterpretGPUParams()
for _ in range(3):
    with plgpu.force_gpu_interpret_mode(mode):
        jax.block_until_ready(run())
assert len(traced) == 1, f"traced {len(traced)} times"
# It ends with: AssertionError: traced 2 times
