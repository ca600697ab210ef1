"""Scales of tokens, as the warpgroup that widens finds them: a factor for each key and each value.

Numbers times their scales are float16. So all scales of a step leave out a power of two that the
largest has, and what is far below it loses bits: int8 from 2^-20 of it on, float8_e5m2 from 2^-12.
"""

import math
from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from ....cache.quantise import LARGEST
from ..warpgroup import THREADS
from .float16 import BIAS, LARGEST_EXPONENT, exponent_of
from .kernel_config import KernelConfig
from .registers import load
from .tile_tasks import TileTask
from .tiles import first_key

LEAST = 1.0 - BIAS  # of an exponent: 1 over its power is a normal number
# A step has as many keys as a warpgroup has threads.
ONE_EACH = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
ALL_IN_A_WARP = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS,), (4,))),
    warp_dims=(plgpu.Replicated(4),),
    lane_dims=(-2,),
    vector_dim=-1,
)


class Scales(NamedTuple):
    """`[num_blocks, block_size, num_kv_heads]` or `f32[num_kv_heads]`, in the device's memory.

    Or those of the keys of a step, or of a head.
    """

    key: Any = None
    value: Any = None


class Tokens(NamedTuple):
    """Of each key of a step: its position in its sequence, and whether a query sees it."""

    position: Any
    seen: Any


class Exponents(NamedTuple):
    """Of the powers of two that a step's keys and values leave out, as float32."""

    key: Any
    value: Any


class Rows(NamedTuple):
    """Memory for 128 numbers each: scales of a step's tokens, and the exponents of some steps."""

    key: Any
    value: Any
    exponents: Any


def exponent_places(slot) -> tuple[Any, Any]:
    """Indices into `Rows.exponents`, of the keys and of the values of the step in a slot."""
    return 2 * slot, 2 * slot + 1


def exponents_of(config: KernelConfig, rows: Rows, before) -> Exponents:
    """`before` is that of the values so far: it never falls, since their sums leave it out too."""
    bits = math.ceil(math.log2(LARGEST[str(config.cache_dtype)]))
    too_much = bits - LARGEST_EXPONENT - BIAS
    scales = (load(row, ALL_IN_A_WARP) for row in (rows.key, rows.value))
    largest_ones = (jnp.max(exponent_of(scale)) + too_much for scale in scales)
    key, value = (exponent.astype(jnp.float32) for exponent in largest_ones)
    return Exponents(jnp.maximum(key, LEAST), jnp.maximum(value, before))


def tokens_of(config: KernelConfig, task: TileTask, step) -> Tokens:
    """Those of a step of a tile."""
    keys = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=ONE_EACH)
    position = (task.blocks.last - step) * config.keys + keys
    seen = (position >= first_key(config, task.tile)) & (position < task.tile.key_len)
    return Tokens(jnp.maximum(position, 0), seen)


def blocks_of(config: KernelConfig, tables, sequence, tokens: Tokens):
    """The entries of block tables."""
    block = lax.div(tokens.position, jnp.int32(config.block_size))
    sequence = constant(jnp.minimum(sequence, config.num_seqs - 1))
    return gather(tables, sequence, jnp.minimum(block, config.max_blocks - 1))


def scales_at(config: KernelConfig, scales, head, tokens: Tokens, blocks):
    """0 where no query sees the key, whatever is there."""
    row = lax.rem(tokens.position, jnp.int32(config.block_size))
    found = gather(scales, jnp.where(tokens.seen, blocks, 0), row, constant(head))
    return jnp.where(tokens.seen, found, 0.0)


def constant(value):
    return plgpu.layout_cast(jnp.full((THREADS,), value, jnp.int32), ONE_EACH)


def gather(ref, *indices, layout: Any = ONE_EACH):
    """Elements of an array in memory: each thread reads those at its indices."""
    result = plgpu.ShapeDtypeStruct(indices[0].shape, ref.dtype, layout=layout)
    types = plgpu.RefType(), *[layout] * len(indices)
    return plgpu.inline_mgpu(arg_types=types, return_type=result)(gathered)(ref, *indices)


def gathered(_, ref, *indices):
    places = [[*index.registers.flat] for index in indices]
    elements = [element_at(ref, place) for place in zip(*places, strict=True)]
    registers = np.array(elements, dtype=object).reshape(indices[0].registers.shape)
    is_signed = True if isinstance(ref.type.element_type, ir.IntegerType) else None
    return mgpu.FragmentedArray(
        _registers=registers, _layout=indices[0].layout, _is_signed=is_signed
    )


def element_at(ref, place):
    """A vector of one element, at indices that are vectors of one."""
    numbers = [vector.extract(i, dynamic_position=[], static_position=[0]) for i in place]
    index = ir.IndexType.get()
    element = memref.load(ref, [arith.index_cast(index, number) for number in numbers])
    return vector.broadcast(ir.VectorType.get((1,), element.type), element)
