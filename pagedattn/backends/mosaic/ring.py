"""Memory that is filled by one warpgroup, used by others, and filled again: step after step."""

from typing import Any, NamedTuple

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


class Ring(NamedTuple):
    """Keys or values of some steps in a multiprocessor's memory."""

    room: Any  # [stages, keys, head_dim]
    full: Any
    free: Any

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.room.shape[0]))

    def free_slot(self, step):
        """The slot of a step, once what was there is no longer needed."""

        @pl.when(step >= self.room.shape[0])
        def wait_for_room():
            plgpu.barrier_wait(self.free.at[self.slot(step)])

        return self.slot(step)
