"""Memory that is filled by one warpgroup, used by others, and filled again: step after step."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


class Ring(NamedTuple):
    """A ring buffer in shared memory, with its barriers: step n has slot n % slots.

    Fields:
      room: the buffer, `[slots, ...]`.
      full: barriers, one a slot: it has been filled.
      free: barriers, one a slot: all who read it are done.
    """

    room: Any
    full: Any
    free: Any

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.room.shape[0]))

    def free_slot(self, step):
        """Waits until the slot of a step may be overwritten, and returns it."""

        @pl.when(step >= self.room.shape[0])
        def wait_for_room():
            plgpu.barrier_wait(self.free.at[self.slot(step)])

        return self.slot(step)
