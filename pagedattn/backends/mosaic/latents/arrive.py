"""Arrivals in all programs of a cluster."""

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu


def release(barrier):
    """Arrives at a barrier of a cluster, when all threads of the warpgroup are here.

    Such a barrier counts warpgroups, not threads: one thread arrives for the others.
    """
    plgpu.inline_mgpu()(together)()
    plgpu.barrier_arrive(barrier)


def together(_):
    mgpu.warpgroup_barrier()
