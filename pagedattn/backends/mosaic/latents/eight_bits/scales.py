"""Per-token scales of a step's keys, from the device's memory."""

from typing import Any, NamedTuple

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from ...dense.token_scales import Tokens, blocks_of, scales_at
from ..kernel_config import KEYS, KernelConfig
from ..softmax import LAYOUT

ROWS = LAYOUT.reduce(1)


class Found(NamedTuple):
    """Scales of a step's keys, `f32[keys]`, and the blocks of the next one; None without such."""

    scales: Any
    blocks: Any


class TokenScales:
    """Of some steps. Blocks are looked up two steps ahead, scales one: each load takes long."""

    def __init__(self, config: KernelConfig, arrays, work_item):
        self.config, self.arrays, self.work_item = config, arrays, work_item

    def first(self, step) -> Found:
        return Found(self.scales(step, self.blocks(step)), self.blocks(step + 1))

    def next(self, step, found: Found) -> Found:
        """What is found for a step, and then for the next one."""
        return Found(self.scales(step + 1, found.blocks), self.blocks(step + 2))

    def blocks(self, step):
        if not self.config.token_scales:
            return None
        sequence, tokens = self.work_item.sequence, self.tokens(step)
        return blocks_of(self.config, self.arrays.tables, sequence, tokens, ROWS)

    def scales(self, step, blocks):
        if blocks is None:
            return None
        return scales_at(self.config, self.arrays.scales, 0, self.tokens(step), blocks, ROWS)

    def tokens(self, step) -> Tokens:
        row = plgpu.broadcasted_iota(jnp.int32, (KEYS,), 0, layout=ROWS)
        position = (self.work_item.last - step) * KEYS + row
        seen = (position >= 0) & (position < self.work_item.limit)
        return Tokens(jnp.maximum(position, 0), seen)
