"""Decoding 64 sequences behind one prompt: its keys read once, or once for each sequence.

    python examples/shared_prefix.py

Both programs compute the same; the tables alone say which blocks are shared.
"""

import functools
import time

import jax
import jax.numpy as jnp

import pagedattn as pa

BLOCK_SIZE, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128


def step(num_seqs: int, prefix: int, suffix: int) -> tuple[jax.Array, pa.KVCache, pa.BatchMetadata]:
    """Query, cache and batch of a decode step: blocks of the prefix, then of each one's own."""
    shared, own = prefix // BLOCK_SIZE, suffix // BLOCK_SIZE
    firsts = [shared + s * own for s in range(num_seqs)]
    tables = [[*range(shared), *range(first, first + own)] for first in firsts]
    contexts = [prefix + suffix - 1] * num_seqs
    batch = pa.make_batch([1] * num_seqs, contexts, tables, block_size=BLOCK_SIZE)
    shape, keys = (shared + num_seqs * own, BLOCK_SIZE), jax.random.split(jax.random.key(0), 3)
    key, value = (
        jax.random.normal(k, (*shape, KV_HEADS, HEAD_DIM), jnp.bfloat16) for k in keys[:2]
    )
    query = jax.random.normal(keys[2], (num_seqs, HEADS, HEAD_DIM), jnp.bfloat16)
    return query, pa.KVCache(key, value), batch


@jax.jit
def cascade(query, cache, batch):
    return pa.cascade_attention(query, cache, *pa.split_prefix(batch))


def seconds_of(function, *args, repeats: int = 9) -> float:
    """Of the fastest run; the first one compiles."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - start)
    return min(times[1:])


def main(num_seqs: int = 64, prefix: int = 8192, suffix: int = 128) -> float:
    """The largest difference between both programs."""
    plain = jax.jit(functools.partial(pa.paged_attention, return_lse=True))
    args = step(num_seqs, prefix, suffix)
    slow, fast = seconds_of(plain, *args), seconds_of(cascade, *args)
    print(f"{num_seqs} sequences over {prefix} shared tokens, on {jax.devices()[0].device_kind}:")
    print(f"paged_attention {1e3 * slow:.2f} ms, cascade_attention {1e3 * fast:.2f} ms")
    ours, theirs = (run(*args)[0].astype(jnp.float32) for run in (cascade, plain))
    return float(jnp.abs(ours - theirs).max())


if __name__ == "__main__":
    print(f"largest difference {main():.4f}")
