"""A barrier at which nobody arrives: the program never ends, and says nothing."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def kernel(out, there):
    plgpu.barrier_wait(there)
    out[...] = jnp.ones((128,), jnp.float32)


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
    scratch_types=[plgpu.Barrier()],
    interpret=plgpu.InterpretGPUParams(),
)
try:
    jax.block_until_ready(run())
except jax.errors.JaxRuntimeError as error:
    if "deadlock" not in str(error).lower():
        raise
else:
    raise AssertionError("a deadlock, and none is reported")
# It ends with: nothing: it hangs
