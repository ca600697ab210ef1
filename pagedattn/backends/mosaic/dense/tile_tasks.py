"""The tasks of a program, one after another: whole tiles, or some of a tile's keys."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from .kernel_config import KernelConfig
from .tiles import KeyBlocks, Tile, key_blocks, unsigned_cdiv


class WorkItem(NamedTuple):
    """What part of a tile's keys a task has."""

    part: Any
    goes_on: Any  # the tile begins in this part and goes on in the next ones, up to and with `last`
    last: Any
    is_rest: Any  # the tile begins in an earlier part, which waits for the task's results


class TileTask(NamedTuple):
    """A tile of this program: which one it is, and how many steps were before it."""

    index: Any
    tile: Tile
    blocks: KeyBlocks
    head: Any
    done: Any
    work_item: WorkItem | None = None  # None: all of the tile's keys


class TileTasks(NamedTuple):
    """How many tasks a program has, and how to find one: loads from tables, then arithmetic.

    The two are apart because loads take long: they are issued early, and awaited by the arithmetic.
    """

    count: Any
    look_up: Callable  # from the number of a task to what `task_of` needs of it
    task_of: Callable  # from the number, what was looked up, and the steps before it, to the task


def visit_all(tasks_of: Callable[[], TileTasks], begin, visit):
    """Visits the tasks of a program; tables are looked into two tasks ahead.

    `begin(task)` gives what the first visit starts with, `visit(task, following, has_next,
    started)` what the next one does.
    """

    tasks = tasks_of()

    def visit_one(index, carry):
        done, found, next_found, started = carry
        ahead = tasks.look_up(index + 2)
        task = tasks.task_of(index, found, done)
        following = tasks.task_of(index + 1, next_found, done + task.blocks.count)
        started = visit(task, following, index + 1 < tasks.count, started)
        return following.done, next_found, ahead, started

    @pl.when(tasks.count > 0)
    def there_are_tasks():
        first, done = jnp.int32(0), jnp.int32(0)
        found = tasks.look_up(first), tasks.look_up(first + 1)
        started = begin(tasks.task_of(first, found[0], done))
        lax.fori_loop(0, tasks.count, visit_one, (done, *found, started))


def whole_tiles(config: KernelConfig, programs: int, me, schedule) -> TileTasks:
    """Tiles of this program: back and forth over all, so that long ones are shared."""
    total = schedule.count[0] * config.num_kv_heads

    def nth(index):
        column = jnp.where(lax.rem(index, 2) == 0, me, programs - 1 - me)
        return index * programs + column

    rounds = unsigned_cdiv(total, programs)
    rounds = jnp.where(nth(rounds - 1) < total, rounds, rounds - 1)

    def look_up(index):
        row = lax.div(nth(index), jnp.int32(config.num_kv_heads))
        row = jnp.minimum(row, config.max_tiles - 1)
        return Tile(*(schedule.tiles[row, i] for i in range(len(Tile._fields))))

    def task_of(index, tile, done):
        head = lax.rem(nth(index), jnp.int32(config.num_kv_heads))
        return TileTask(index, tile, key_blocks(config, tile), head, done)

    return TileTasks(rounds, look_up, task_of)
