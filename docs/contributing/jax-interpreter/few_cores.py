"""XLA has a thread for each core: on two, those that wait at a barrier starve the others."""

import os

os.environ["NPROC"] = "2"  # as on two cores; with 32 it ends

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def kernel(out, there):
    me = lax.axis_index("wg")
    pl.when(me < 3)(lambda: plgpu.barrier_wait(there))
    pl.when(me == 3)(lambda: plgpu.barrier_arrive(there))
    x = jnp.full((64, 64), me, jnp.float32)  # enough work for XLA to run it in its pool
    out.at[me][...] = jnp.exp(x @ x)


run = plgpu.kernel(
    kernel,
    num_threads=4,
    thread_name="wg",
    out_type=jax.ShapeDtypeStruct((4, 64, 64), jnp.float32),
    scratch_types=[plgpu.Barrier()],
    interpret=plgpu.InterpretGPUParams(),
)
jax.block_until_ready(run())
# It ends with: nothing: it hangs
