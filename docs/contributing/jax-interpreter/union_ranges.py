"""Two threads use different halves of a RefUnion by different members: a race is reported."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def kernel(out, union):
    matrix, halves = union
    first = lax.axis_index("wg") == 0

    @jax.experimental.pallas.when(first)
    def write_rows():
        matrix.at[:64][...] = jnp.ones((64, 64), jnp.float32)

    @jax.experimental.pallas.when(jnp.logical_not(first))
    def write_a_half():
        halves.at[1][...] = jnp.ones((64, 64), jnp.float32)


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((64,), jnp.float32),
    num_threads=2,
    thread_name="wg",
    scratch_types=[
        plgpu.RefUnion(plgpu.SMEM((128, 64), jnp.float32), plgpu.SMEM((2, 64, 64), jnp.float32))
    ],
    interpret=plgpu.InterpretGPUParams(detect_races=True),
)
jax.block_until_ready(run())
# It ends with: RACE DETECTED
