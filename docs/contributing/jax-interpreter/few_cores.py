"""With as few of XLA's threads as two cores give, threads that wait at a barrier starve the others."""

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
    out.at[me][...] = jnp.ones((128,), jnp.float32)


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((4, 128), jnp.float32),
    num_threads=4,
    thread_name="wg",
    scratch_types=[plgpu.Barrier()],
    interpret=plgpu.InterpretGPUParams(),
)
assert (run() == 1).all()
