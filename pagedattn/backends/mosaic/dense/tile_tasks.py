"""The jobs of a program, one after another: tiles, or pieces of tiles."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from .kernel_config import Shape
from .tiles import KeyBlocks, Tile, cdiv, key_blocks


class Piece(NamedTuple):
    """What part of a tile's keys a job has."""

    part: Any
    goes_on: Any  # the tile begins in this part and goes on in the next ones, up to and with `last`
    last: Any
    is_rest: Any  # the tile begins in an earlier part, which waits for the job's results


class Job(NamedTuple):
    """A tile of this program: which one it is, and how many steps were before it."""

    index: Any
    tile: Tile
    blocks: KeyBlocks
    head: Any
    done: Any
    piece: Piece | None = None  # None: all of the tile's keys


class Jobs(NamedTuple):
    """How many jobs a program has, and how to find one: loads from tables, then arithmetic.

    The two are apart because loads take long: they are issued early, and awaited by the arithmetic.
    """

    count: Any
    look_up: Callable  # from the number of a job to what `job_of` needs of it
    job_of: Callable  # from the number, what was looked up, and the steps before it, to the job


def visit_all(jobs_of: Callable[[], Jobs], begin, visit):
    """Visits the jobs of a program; tables are looked into two jobs ahead.

    `begin(job)` gives what the first visit starts with, `visit(job, following, has_next, started)`
    what the next one does.
    """

    jobs = jobs_of()

    def visit_one(index, carry):
        done, found, next_found, started = carry
        ahead = jobs.look_up(index + 2)
        job = jobs.job_of(index, found, done)
        following = jobs.job_of(index + 1, next_found, done + job.blocks.count)
        started = visit(job, following, index + 1 < jobs.count, started)
        return following.done, next_found, ahead, started

    @pl.when(jobs.count > 0)
    def there_is_work():
        first, done = jnp.int32(0), jnp.int32(0)
        found = jobs.look_up(first), jobs.look_up(first + 1)
        started = begin(jobs.job_of(first, found[0], done))
        lax.fori_loop(0, jobs.count, visit_one, (done, *found, started))


def whole_tiles(shape: Shape, programs: int, me, work) -> Jobs:
    """Tiles of this program: back and forth over all, so that long ones are shared."""
    total = work.count[0] * shape.num_kv_heads

    def nth(index):
        column = jnp.where(lax.rem(index, 2) == 0, me, programs - 1 - me)
        return index * programs + column

    rounds = cdiv(total, programs)
    rounds = jnp.where(nth(rounds - 1) < total, rounds, rounds - 1)

    def look_up(index):
        row = lax.div(nth(index), jnp.int32(shape.num_kv_heads))
        row = jnp.minimum(row, shape.max_tiles - 1)
        return Tile(*(work.tiles[row, i] for i in range(len(Tile._fields))))

    def job_of(index, tile, done):
        head = lax.rem(nth(index), jnp.int32(shape.num_kv_heads))
        return Job(index, tile, key_blocks(shape, tile), head, done)

    return Jobs(rounds, look_up, job_of)
