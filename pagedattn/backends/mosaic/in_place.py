"""Kernels that write where they find an operand: their semaphores, which are zeroed before."""

import jax


def unfused(kernel):
    """The same kernel, of which no operand or result is a part of another array.

    Where an operand is a slice, as one layer of stacked caches, or a loop collects the results, XLA
    for GPUs (with JAX 0.11 and 0.12) makes one fusion of the slices and the kernel. It forgets that
    the kernel writes in place, and gives it other memory to write to: tests/hopper shows it.
    """
    barrier = jax.lax.optimization_barrier  # one for each: inside shard_map they may vary or not

    def behind_barriers(*arrays):
        return jax.tree.map(barrier, kernel(*map(barrier, arrays)))

    return behind_barriers
