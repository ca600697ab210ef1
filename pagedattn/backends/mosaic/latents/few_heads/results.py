"""Where results go."""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

from ..cut_tokens import Places, Sums, normalised
from ..kernel_config import VALUE_DIM, KernelConfig
from .chunks import CHUNK, CHUNKS, PIECE, pieces, value_columns

HEADS_AXIS = 1


def places(tile) -> Places:
    """Where sums are left, `f32[columns, heads]` of each chunk."""
    parts = [(pl.ds(i * CHUNK, value_columns(i)),) for i in range(CHUNKS)]
    return Places(tile, 0, tuple(parts), HEADS_AXIS)


def store(config: KernelConfig, arrays, memory, token, tile, sums: Sums):
    """Results pass through the memory of the queries, which is free by then."""
    means, memory.lse[...] = normalised(sums, HEADS_AXIS)
    stage(memory, [values.astype(memory.query.dtype) for values in means])
    plgpu.copy_smem_to_gmem(memory.lse, arrays.lse.at[token, tile])
    heads = pl.ds(tile * config.rows, config.rows)
    for piece in range(VALUE_DIM // PIECE):
        columns = pl.ds(piece * PIECE, PIECE)
        plgpu.copy_smem_to_gmem(memory.query.at[piece], arrays.out.at[token, heads, columns])


def stage(memory, results):
    """Puts `[columns, heads]` of each chunk where copies find `[heads, columns]`."""
    for chunk, result in enumerate(results):
        turned = plgpu.layout_cast(result, plgpu.Layout.WGMMA_TRANSPOSED)
        for piece, begin in pieces(chunk, value_columns(chunk)):
            memory.query.at[piece].transpose((1, 0))[...] = turned[begin : begin + PIECE]
    plgpu.commit_smem()
