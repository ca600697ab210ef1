"""Members of a RefUnion share memory on the GPU: what one has written, another may read."""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp


def kernel(out, union):
    matrix, rows = union
    matrix[...] = jnp.ones((64, 64), jnp.float32)
    plgpu.commit_smem()
    for i in range(8):  # as results leave by rows: the tiles of the matrix, under another shape
        plgpu.copy_smem_to_gmem(rows.at[i], out.at[pl.ds(8 * i, 8)])
    plgpu.wait_smem_to_gmem(0)


run = plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
    scratch_types=[
        plgpu.RefUnion(plgpu.SMEM((64, 64), jnp.float32), plgpu.SMEM((8, 8, 64), jnp.float32))
    ],
    interpret=plgpu.InterpretGPUParams(detect_races=True),
)
assert (run() == 1).all()
# It ends with: which was last written through alias group 0
