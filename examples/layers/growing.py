"""A batch that grows: at each step a sequence joins with its prompt, the others bring one token.

A model is any function `(x, cache, batch) -> (x, cache)` of hidden states `[num_tokens, size]`.
Two programs serve all steps: one for steps with a prompt, one for steps without.
"""

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np

from layers.sizes import BLOCK_SIZE, NUM_BLOCKS
from pagedattn import BlockPool, KVCache, init_block_pool, next_batch

PROMPT_LENS = (7, 12, 3, 9)
LONGEST, BUDGET = 12, 16  # of a prompt; of a step's tokens


def advance(model: Callable, cache: KVCache, pool: BlockPool, x, new, max_query_len: int):
    """One step: makes room for `new[s]` tokens of each sequence, and runs the model on them."""
    sizes = {"num_tokens": len(x), "max_query_len": max_query_len}
    pool, batch, growth = next_batch(pool, new, **sizes)  # no sequences share blocks to copy here
    x, cache = model(x, cache, batch)
    return x, cache, pool, growth


def feed(step: Callable, cache: KVCache, sequences: list[np.ndarray]) -> tuple[list, KVCache]:
    """Runs all sequences to their ends by `step`, a compiled `advance` whose model is given.

    Returns the model's output for each sequence, and the cache.
    """
    pool = init_block_pool(NUM_BLOCKS, BLOCK_SIZE, max_seqs=len(sequences), max_blocks=8)
    outputs = [[] for _ in sequences]
    for parts in steps_of(sequences):
        new = [len(part) for part in parts]
        num_tokens, longest = (BUDGET, LONGEST) if max(new) > 1 else (len(new), 1)
        x = np.zeros((num_tokens, *parts[0].shape[1:]), np.float32)
        x[: sum(new)] = np.concatenate(parts)
        out, cache, pool, growth = step(cache, pool, jnp.asarray(x), jnp.array(new), longest)
        growth.require()
        for rows, ours in zip(outputs, np.split(np.asarray(out), np.cumsum(new)), strict=False):
            rows.append(ours)
    return [np.concatenate(rows) for rows in outputs], cache


def steps_of(sequences: list[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """What each sequence brings at each step: nothing, its prompt, then a token at a time."""
    done, arrived = [0] * len(sequences), 1
    while any(n < len(x) for n, x in zip(done, sequences, strict=True)):
        ends = [n + 1 if n else PROMPT_LENS[row] for row, n in enumerate(done)]
        ends = [end if row < arrived else 0 for row, end in enumerate(ends)]
        yield [x[n:end] for x, n, end in zip(sequences, done, ends, strict=True)]
        done = [min(len(x), max(n, end)) for x, n, end in zip(sequences, done, ends, strict=True)]
        arrived += 1
