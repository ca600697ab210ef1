"""Decoding that attends to a few blocks of its context, chosen by their keys (Quest).

    python examples/long_context.py

Held-out text is read byte by byte. For each number of blocks that a KV head may read: how often the
next byte is that of dense attention, and how fast. Exit status 1: some differ with all blocks.
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.families.forward import forward_paged
from pagedattn_serving.training.corpus import split_topics

import pagedattn as pa

SEQS, LENGTH, BLOCK = 8, 512, 8  # as long as the model knows positions
MODEL, PARAMS = load_checkpoint(SHIPPED)
TEXT = split_topics()[1][: SEQS * LENGTH].reshape(SEQS, LENGTH).astype(jnp.int32)


@partial(jax.jit, static_argnames="budget", donate_argnames="layers")
def step(params, tokens, layers, batch, budget: int | None):
    """Next bytes, each layer's cache and summaries, and the blocks that it chose."""
    chosen = []

    def attend(operands, held, batch, spec, backend):
        cache = pa.write_kv(held[0], operands.key, operands.value, batch.slot_mapping)
        summaries, options = pa.update_summaries(held[1], cache, batch), {}
        if budget is not None:
            scores = pa.score_blocks(operands.query, summaries, batch)
            options["selection"] = pa.select_blocks(scores, batch, budget, first=1, last=2)
            chosen.append(options["selection"].blocks)
        out = pa.paged_attention(operands.query, cache, batch, spec, backend=backend, **options)
        return out, (cache, summaries)

    hidden, layers = forward_paged(params, MODEL, tokens, layers, batch, attend=attend)
    return MODEL.logits(params, hidden).argmax(1), layers, chosen


def decode(budget: int | None, prompt: int, steps: int):
    """The bytes chosen, the blocks of each step `[steps, layers, ...]`, and bytes a second."""
    tables = np.random.default_rng(0).permutation(SEQS * LENGTH // BLOCK).reshape(SEQS, -1)
    cache = MODEL.init_cache(tables.size, BLOCK, jnp.float32)
    summaries = pa.summarise_blocks(cache, pa.make_batch([0], [0], [[]], block_size=BLOCK))
    layers = [jax.tree.map(jnp.copy, (cache, summaries)) for _ in range(MODEL.num_hidden_layers)]
    found, took = [], []
    for first, end in [(0, prompt), *((at, at + 1) for at in range(prompt, prompt + steps))]:
        start, count = time.perf_counter(), [end - first] * SEQS
        batch = pa.make_batch(count, [first] * SEQS, tables, block_size=BLOCK)
        of_step = budget if first else None  # the prompt attends to everything
        *_, layers, _ = out = step(PARAMS, TEXT[:, first:end].ravel(), layers, batch, of_step)
        found.append((np.asarray(out[0]), np.asarray(out[2])))
        took.append(time.perf_counter() - start)
    made, blocks = zip(*found[1:], strict=True)
    return np.array(made), np.array(blocks), SEQS / np.median(took)


def main(path: str = "long_context.png", prompt: int = 400, steps: int = 100) -> int:
    dense, _, speed = decode(None, prompt, steps)
    print(f"dense attention                 {speed:6.0f} bytes/s")
    for budget in (4, 8, 16, 32, LENGTH // BLOCK):
        got, blocks, speed = decode(budget, prompt, steps)
        print(f"{budget:3} blocks: {(got == dense).mean():6.1%} are alike {speed:6.0f} bytes/s")
        if budget == 8:  # of one sequence, by how many KV heads: blocks down, steps across
            of_one = blocks[:, :, 0].reshape(steps, -1, 1) == np.arange(LENGTH // BLOCK)
            pyplot.imsave(path, of_one.sum(1).T.repeat(4, 0).repeat(4, 1))
    print(f"the blocks that one sequence chose, 8 a step: {path}")
    return int((got != dense).any())


if __name__ == "__main__":
    sys.exit(main())
