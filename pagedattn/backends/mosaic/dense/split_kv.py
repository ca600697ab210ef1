"""Short queries: the keys of all sequences in a row, cut into parts of equal cost.

Each head of keys has as many programs as there are parts, and the programs of a part read the same
pages at the same time. A part is a stretch of that row, so it has some whole tiles and, at its
ends, work items: stretches of tiles that it shares with its neighbours. A sequence has one tile,
for its queries are short; padding has as many as it fills.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .kernel_config import KernelConfig
from .tile_tasks import TileTask, TileTasks, WorkItem
from .tiles import Tile, key_blocks, num_units, unsigned_cdiv

OVERHEAD = 1  # what a work item costs beside its steps, in steps
FEWEST = 2  # steps that are worth a work item of their own


class Schedule(NamedTuple):
    """As `int32` arrays in the device's memory."""

    query_start_loc: Any
    seq_lens: Any
    starts: Any  # [max_tiles + 1]: where each tile begins in the row, and where the row ends
    parts: Any  # [parts, 2]: the first tile of each part, and the one behind its last


def schedule_of(config: KernelConfig, query_start_loc, seq_lens) -> Schedule:
    """The schedule: sums alone, so that XLA needs few kernels for it."""
    lengths = query_start_loc.astype(jnp.int32), seq_lens.astype(jnp.int32)
    tile = tiles_of(config, *lengths)
    number = tile.slot
    cost = key_blocks(config, tile).count + OVERHEAD
    cost = jnp.where(is_one(config, tile), cost, 0)
    before = number[None, :] < jnp.arange(config.max_tiles + 1, dtype=jnp.int32)[:, None]
    starts = jnp.sum(jnp.where(before, cost[None, :], 0), axis=1, dtype=jnp.int32)
    return Schedule(*lengths, starts, parts_of(config, starts))


def parts_of(config: KernelConfig, starts):
    """The tiles of each part: from, and up to."""
    share = share_of(config, starts[-1])
    begin = jnp.arange(config.parts, dtype=jnp.int32)[:, None] * share
    end = jnp.minimum(begin + share, starts[-1])
    first = jnp.sum(starts[None, 1:] <= begin, axis=1, dtype=jnp.int32)
    behind = jnp.sum(starts[None, :-1] + OVERHEAD < end, axis=1, dtype=jnp.int32)
    return jnp.stack([first, behind], axis=1)


def tiles_of(config: KernelConfig, query_start_loc, seq_lens) -> Tile:
    """The tiles by their numbers: one of each sequence, then those of the padding."""
    number = jnp.arange(config.max_tiles, dtype=jnp.int32)
    of_sequence = lengths_at(config, query_start_loc, seq_lens, number)
    return tile_of(config, number, *of_sequence)


def tile_of(config: KernelConfig, number, begin, query_len, key_len) -> Tile:
    sequence = jnp.minimum(number, config.num_seqs)
    first_unit = (number - sequence) * config.units
    return Tile(sequence, begin, query_len, key_len, first_unit, number)


def lengths_at(config: KernelConfig, query_start_loc, seq_lens, number):
    """begin, query_len and key_len of the sequence of a tile, inside their arrays."""
    sequence = jnp.minimum(number, config.num_seqs)

    def start(i):
        known = jnp.clip(query_start_loc[jnp.minimum(i, config.num_seqs)], 0, config.num_tokens)
        return jnp.where(i > config.num_seqs, config.num_tokens, known)

    begin = start(sequence)
    query_len = jnp.maximum(start(sequence + 1) - begin, 0)
    keys = seq_lens[jnp.minimum(sequence, config.num_seqs - 1)]
    keys = jnp.clip(keys, 0, config.max_blocks * config.block_size)
    keys = jnp.where((sequence < config.num_seqs) & (query_len > 0), keys, 0)
    return begin, query_len, keys


def is_one(config: KernelConfig, tile: Tile):
    """Whether there is such a tile: every sequence has one, padding as many as it fills."""
    return (tile.sequence < config.num_seqs) | (tile.first_unit < num_units(config, tile.query_len))


def cut_tiles(config: KernelConfig, me, schedule: Schedule) -> TileTasks:
    """The tasks of a program.

    The last part is that of the first programs: a part waits for those behind it, so that programs
    wait for none that start after them. (GPUs start blocks in the order of their numbers, although
    CUDA does not promise it.)
    """
    part = config.parts - 1 - lax.div(me, jnp.int32(config.num_kv_heads))
    head = lax.rem(me, jnp.int32(config.num_kv_heads))
    share = share_of(config, schedule.starts[config.max_tiles])
    first, behind = schedule.parts[part, 0], schedule.parts[part, 1]

    def look_up(index):
        number = jnp.minimum(first + index, config.max_tiles - 1)
        of_sequence = lengths_at(config, *schedule[:2], number)
        return of_sequence, schedule.starts[number]

    def task_of(index, found, done):
        of_sequence, start = found
        number = jnp.minimum(first + index, config.max_tiles - 1)
        tile = tile_of(config, number, *of_sequence)
        blocks, work_item = item_of(config, part, share, tile, start)
        return TileTask(index, tile, blocks, head, done, work_item)

    return TileTasks(jnp.maximum(behind - first, 0), look_up, task_of)


def share_of(config: KernelConfig, total):
    """The cost of a part."""
    return jnp.maximum(unsigned_cdiv(total, config.parts), OVERHEAD + FEWEST)


def item_of(config: KernelConfig, part, share, tile: Tile, start):
    """The steps of a tile that lie in a part, and who has the others."""
    blocks = key_blocks(config, tile)
    first_step = start + OVERHEAD
    begin = jnp.clip(part * share - first_step, 0, blocks.count)
    end = jnp.clip((part + 1) * share - first_step, 0, blocks.count)
    last = lax.div(first_step + blocks.count - 1, share)
    work_item = WorkItem(part, (begin == 0) & (end < blocks.count), last, begin > 0)
    first_block = blocks.last - blocks.count + 1
    return blocks._replace(last=first_block + end - 1, count=end - begin), work_item
