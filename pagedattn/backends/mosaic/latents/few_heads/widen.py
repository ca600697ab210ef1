"""The warpgroups that make bfloat16 of latents of eight bits, exactly, in shared memory.

They take chunks in turn: with halves of each chunk they would wait for memory twice as often.
Scales of tokens, factors on logits and on weights, are put there with a step's first chunk.
"""

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from ...dense.float16 import float16_of
from ...dense.registers import load
from ...dense.token_scales import ONE_EACH, THREADS, Tokens, blocks_of, scales_at
from ...ring import Ring
from ..kernel_config import KEYS, KernelConfig
from .chunks import CHUNK, CHUNKS, PIECE

WIDENING = 2  # warpgroups
# Eight threads have 64 columns of a row: no two meet in a bank, as they read or as they write.
NUMBERS = plgpu.Layout.TILED(
    plgpu.Tiling(((16, PIECE), (4, PIECE), (8,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
REGISTERS = 96  # of a thread: room for what is loaded at once


def widen(config: KernelConfig, arrays, scales, rings: tuple[Ring, Ring], turn, work_items):
    """Fills the wide ring from the one of eight bits, in the order in which chunks are loaded.

    Blocks are looked up two steps ahead, their scales one: each load takes long. Both warpgroups do
    so at each step, for either may have its first chunk.
    """
    plgpu.set_max_registers(REGISTERS, action="decrease")
    held, wide = rings

    def visit(work_item, index, _):
        def look_up(step):
            if not config.token_scales:
                return None
            return blocks_of(config, arrays.tables, work_item.sequence, tokens_of(work_item, step))

        def found(step, blocks):
            if blocks is None:
                return None
            return scales_at(config, arrays.scales, 0, tokens_of(work_item, step), blocks)

        def step(i, carry):
            of_tokens, blocks = carry
            number, ahead, blocks = work_item.done + i, found(i + 1, blocks), look_up(i + 2)
            for chunk in range(CHUNKS):

                @pl.when(lax.rem(number * CHUNKS + chunk, jnp.int32(WIDENING)) == turn)
                def mine(chunk=chunk):
                    wide.free_slot(number * CHUNKS + chunk)
                    if chunk == 0 and of_tokens is not None:
                        scales.at[lax.rem(number, jnp.int32(scales.shape[0]))][...] = of_tokens
                    widen_chunk(held, wide, number * CHUNKS + chunk)

            return ahead, blocks

        zero, one = jnp.int32(0), jnp.int32(1)
        blocks = look_up(one)
        lax.fori_loop(0, work_item.steps, step, (found(zero, look_up(zero)), blocks))
        return ()

    work_items(visit, ())


def widen_chunk(held: Ring, wide: Ring, number):
    """There is room for a chunk that is loaded, or in registers."""
    target, source = wide.slot(number), held.slot(number)
    parts = [pl.ds(begin, PIECE) for begin in range(0, CHUNK, PIECE)]
    plgpu.barrier_wait(held.full.at[source])
    numbers = [load(held.room.at[source, :, part], NUMBERS) for part in parts]
    plgpu.commit_smem()  # all warps have read
    plgpu.barrier_arrive(held.free.at[source])
    for part, eight_bits in zip(parts, numbers, strict=True):
        exact = float16_of(eight_bits, NUMBERS).astype(jnp.float32)
        wide.room.at[target, :, part][...] = exact.astype(wide.room.dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(wide.full.at[target])


def tokens_of(work_item, step) -> Tokens:
    """Those of a step's 64 keys, twice."""
    thread = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=ONE_EACH)
    position = (work_item.last - step) * KEYS + (thread & (KEYS - 1))
    seen = (position >= 0) & (position < work_item.limit)
    return Tokens(jnp.maximum(position, 0), seen)
