"""Where results go."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from ..cut_tokens import Sums, normalised
from ..kernel_config import ROWS, KernelConfig
from .shares import HALF, LSE

HEADS_AXIS = 0


def store(config: KernelConfig, arrays, memory, token, tile, me: int, sums: Sums):
    """Results pass through the memory of the queries, which is free by then."""
    (out,), lse = normalised(sums, HEADS_AXIS)
    staged = memory.query.at[me]
    staged[...] = out.astype(staged.dtype)
    if me == 0:
        memory.vectors.at[LSE][...] = lse
    plgpu.commit_smem()
    rows, columns = pl.ds(tile * ROWS, ROWS), pl.ds(me * HALF, HALF)
    plgpu.copy_smem_to_gmem(staged, arrays.out.at[token, rows, columns])
    if me == 0:
        plgpu.copy_smem_to_gmem(memory.vectors.at[LSE], arrays.lse.at[token, tile])
