"""Times a block pool's decode step for pools of several sizes: it should take the same time.

PYTHONPATH=examples python -m benchmarks.pool
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

from pagedattn import append_tokens, init_block_pool

MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, STEPS = 64, 256, 16, 500


@functools.partial(jax.jit, donate_argnums=0)
def decode(pool):
    """Makes room for one more token of each sequence, `STEPS` times."""

    def step(pool, _):
        pool, growth = append_tokens(pool, jnp.ones(MAX_SEQS, jnp.int32), max_new_tokens=1)
        return pool, growth.ok.all()

    return jax.lax.scan(step, pool, length=STEPS)


def microseconds_a_step(num_blocks: int) -> float:
    times = []
    for _ in range(6):
        pool = init_block_pool(num_blocks, BLOCK_SIZE, max_seqs=MAX_SEQS, max_blocks=MAX_BLOCKS)
        jax.block_until_ready(pool)
        start = time.perf_counter()
        jax.block_until_ready(decode(pool))
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:])) / STEPS * 1e6  # the first run compiles


def main():
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, {MAX_SEQS} sequences")
    for num_blocks in (4_000, 20_000, 100_000):
        print(f"{num_blocks:>8,} blocks: {microseconds_a_step(num_blocks):6.1f} us a step")


if __name__ == "__main__":
    main()
