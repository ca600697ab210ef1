"""Where results go: to their token, or to a slot for partial ones."""

import math

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from .kernel_config import HALF, LSE, ROWS, KernelConfig
from .softmax import wide


def store(config: KernelConfig, arrays, memory, work_item, tile, me: int, out, state):
    """Results pass through the memory of the queries, which is free by then."""
    some = state.total > 0
    share = jnp.where(some, 1 / jnp.where(some, state.total, 1.0), 0.0)
    out = out * wide(share, out)
    high = out.astype(memory.query.dtype)
    rows, columns = pl.ds(tile * ROWS, ROWS), pl.ds(me * HALF, HALF)
    staged = memory.query.at[me]
    staged[...] = high
    if me == 0:
        memory.vectors.at[LSE][...] = (state.top + jnp.log2(state.total)) * math.log(2)
    plgpu.commit_smem()

    @pl.when(work_item.slot < 0)
    def whole():
        plgpu.copy_smem_to_gmem(staged, arrays.out.at[work_item.token, rows, columns])
        if me == 0:
            plgpu.copy_smem_to_gmem(memory.vectors.at[LSE], arrays.lse.at[work_item.token, tile])

    @pl.when(work_item.slot >= 0)
    def partial():
        plgpu.copy_smem_to_gmem(staged, arrays.part_out.at[0, work_item.slot, rows, columns])
        if me == 0:
            plgpu.copy_smem_to_gmem(
                memory.vectors.at[LSE], arrays.part_lse.at[work_item.slot, tile]
            )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.commit_smem()
        staged[...] = (out - high.astype(jnp.float32)).astype(high.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staged, arrays.part_out.at[1, work_item.slot, rows, columns])
