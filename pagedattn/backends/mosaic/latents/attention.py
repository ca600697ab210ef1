"""Launches the kernel over latents that fits the cache's dtype and the heads of a tile."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ...._arrays.shard_map import traced_apart
from ..in_place import unfused
from .eight_bits import kernel as eight_bits
from .few_heads import kernel as few_heads
from .kernel_config import ROWS, VALUE_DIM, KernelConfig
from .many_heads import kernel as many_heads
from .pages import first_blocks
from .split_kv import Schedule


class Arrays(NamedTuple):
    """In the device's memory."""

    query: Any
    latents: Any
    scales: Any  # of tokens, `[num_blocks * block_size]`; or None
    tables: Any
    tokens: Any
    parts: Any
    first_blocks: Any  # of each part, `[parts, pages]`
    out: Any
    lse: Any
    part_sums: Any  # of the first item of each part: sums of weighted values,
    part_state: Any  # the largest logits and the sums of weights
    finished: Any = None  # semaphores: whether the two are there


def program_of(config: KernelConfig):
    if config.cache_dtype:
        return eight_bits
    return many_heads if config.rows == ROWS else few_heads


def attention(config: KernelConfig, query, latents, scales, tables, schedule: Schedule):
    """out `[num_tokens, num_heads, 512]` and lse `f32[num_tokens, tiles, rows]`."""
    program = program_of(config)
    left = config.parts, config.tiles, program.SUMMING  # one of each may leave sums to others
    ahead = first_blocks(config, schedule, tables)
    operands, structure = jax.tree.flatten((query, latents, scales, tables, *schedule, ahead))

    def body(*refs):
        inputs, results = refs[: len(operands)], refs[len(operands) :]
        finished = pl.get_global(plgpu.SemaphoreType.REGULAR(left))
        arrays = Arrays(*jax.tree.unflatten(structure, inputs), *results)
        arrays = arrays._replace(finished=finished)
        run = functools.partial(program.program, config, arrays)
        scratch = program.memory_of(config, query.dtype), program.barriers_of(config)
        pl.run_scoped(run, *scratch, collective_axes="wg")

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((config.num_tokens, config.num_heads, VALUE_DIM), query.dtype),
            jax.ShapeDtypeStruct((config.num_tokens, config.tiles, config.rows), jnp.float32),
            jax.ShapeDtypeStruct((*left, *program.sums_shape(config)), jnp.float32),
            jax.ShapeDtypeStruct((*left, 2, config.rows), jnp.float32),
        ),
        grid=(config.parts, config.tiles // config.cluster),
        grid_names=("part", "group"),
        cluster=(config.cluster,),
        cluster_names=("mate",),
        num_threads=program.WARPGROUPS,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            reduction_scratch_bytes=program.scratch_bytes(config),
            unsafe_no_auto_barriers=True,
        ),
    )
    out, lse, *_ = traced_apart(unfused(kernel), *operands)
    return out, lse
