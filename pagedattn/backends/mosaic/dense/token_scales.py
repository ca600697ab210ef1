"""Scales of tokens, as the warpgroup that widens finds them: a factor for each key and each value.

A key's scale is a factor on its logits. A value's is one on its columns, in float32 before they are
rounded: an error of bfloat16, as that of the weights.
"""

from typing import Any, NamedTuple

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, memref, vector

from .kernel_config import KernelConfig
from .tile_tasks import TileTask
from .tiles import first_key

THREADS = 128  # of a warpgroup: as many as a step has keys
ONE_EACH = plgpu.Layout.TILED(
    plgpu.Tiling(((THREADS,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


class Scales(NamedTuple):
    """`[num_blocks, block_size, num_kv_heads]`, in the device's memory; None without such.

    Or those of the keys of a step.
    """

    key: Any = None
    value: Any = None


def scales_of(config: KernelConfig, arrays, task: TileTask, step) -> Scales:
    """Those of a step of a tile; 1 where no query sees the key, whatever is there."""
    tile = task.tile
    keys = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=ONE_EACH)
    position = (task.blocks.last - step) * config.keys + keys
    seen = (position >= first_key(config, tile)) & (position < tile.key_len)
    position = jnp.maximum(position, 0)
    index = jnp.minimum(lax.div(position, jnp.int32(config.block_size)), config.max_blocks - 1)
    sequence = jnp.minimum(tile.sequence, config.num_seqs - 1)
    block = gather(arrays.tables, constant(sequence), index)
    block = jnp.where(seen, block, 0)
    row, head = lax.rem(position, jnp.int32(config.block_size)), constant(task.head)
    found = (gather(scales, block, row, head) for scales in arrays.scales)
    return Scales(*(jnp.where(seen, scale, 1.0) for scale in found))


def constant(value):
    return plgpu.layout_cast(jnp.full((THREADS,), value, jnp.int32), ONE_EACH)


def gather(ref, *indices):
    """Elements of an array in the device's memory: each thread reads the one at its indices."""
    result = plgpu.ShapeDtypeStruct((THREADS,), ref.dtype, layout=ONE_EACH)
    types = plgpu.RefType(), *[ONE_EACH] * len(indices)
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
