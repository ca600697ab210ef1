"""Drafts by prompt lookup, verified as chains and as trees: the same tokens in fewer steps.

    python examples/speculative.py

Earlier text that ends like the last tokens do says how they go on (drafts/lookup.py): its latest
continuation is a chain, several are a tree. A step verifies all, `accept_tokens` keeps the line
that the model chooses itself. Other tokens than plain decoding's make the exit status 1.
"""

import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from drafts.lookup import Drafts, look_up, packed
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.checkpoint.tokenizer import load_tokenizer
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.families.forward import forward_paged

import pagedattn as pa

MODES = {"plain": (0, 0), "chains": (1, 7), "trees": (4, 4)}  # lines at most, and tokens of each
accept = jax.jit(pa.accept_tokens, donate_argnums=(0, 1))


@partial(jax.jit, static_argnames=("model", "most"), donate_argnames=("pool", "caches"))
def verify(params, model, pool, caches, tokens, lens, parents, most: int):
    """The likeliest token after each of the new ones, at most so many of a sequence."""
    sizes = {"num_tokens": len(tokens), "max_query_len": most}
    pool, batch, _ = pa.next_batch(pool, lens, parents=parents, **sizes)
    hidden, caches = forward_paged(params, model, tokens, caches, batch)
    return pool, caches, batch, model.logits(params, hidden).argmax(-1)


def generate(params, model, texts: list[str], new: int, mode: str) -> tuple[list[str], float]:
    """The texts with so many new tokens, and how many a sequence gets in a step."""
    (lines, depth), texts, ends, turns = MODES[mode], [*texts], [len(t) + new for t in texts], 0
    most, longest, blocks = 1 + lines * depth, max(map(len, texts)), max(ends) // 16 + 3
    pool = pa.init_block_pool(len(ends) * blocks, 16, max_seqs=len(ends), max_blocks=blocks)
    caches = [model.init_cache(pool.num_blocks, 16, jnp.float32) for _ in params["layers"]]
    rows = [[*map(ord, text[:-1])] for text in texts]  # the last token comes with its drafts
    prompts = packed(rows, longest), jnp.array([*map(len, rows)]), None, longest
    pool, caches, *_ = verify(params, model, pool, caches, *prompts)
    drafts = [look_up(text, lines, depth) for text in texts]
    while any(draft.tokens for draft in drafts):
        lens = np.array([len(draft.tokens) for draft in drafts])
        tokens, parents = (packed([*row], most) for row in zip(*drafts, strict=True))
        new_tokens = tokens, jnp.array(lens), parents if lines > 1 else None, most
        pool, caches, batch, chosen = verify(params, model, pool, caches, *new_tokens)
        path = np.full((len(ends), 1 + depth), -1)
        for s, likeliest in enumerate(np.split(np.asarray(chosen), lens.cumsum())[:-1]):
            kept = drafts[s].path(likeliest.tolist())
            path[s, : len(kept)], turns = kept, turns + bool(kept)
            texts[s] += "".join(map(chr, likeliest[kept]))
            goes_on = len(texts[s]) < ends[s]
            drafts[s] = look_up(texts[s], lines, depth) if goes_on else Drafts([], [])
        pool, caches, _ = accept(pool, caches, jnp.array(path), batch)
    found = sum(map(len, texts)) - sum(ends) + new * len(ends)
    return [text[:end] for text, end in zip(texts, ends, strict=True)], found / turns


def main(new: int = 200, prompts: tuple[str, ...] = PROMPTS[1:2]) -> int:
    (model, params), encode = load_checkpoint(SHIPPED), load_tokenizer(SHIPPED).encode
    texts, results, seconds = ["".join(map(chr, encode(p))) for p in prompts], {}, {}
    for mode in 2 * [*MODES]:  # the first time compiles
        start = time.perf_counter()
        results[mode], a_step = generate(params, model, texts, new, mode)
        seconds[mode] = time.perf_counter() - start, a_step
    for mode, (taken, a_step) in seconds.items():
        print(f"{mode}: {a_step:.2f} tokens a step, {seconds['plain'][0] / taken:.2f} x the speed")
    return int(not results["plain"] == results["chains"] == results["trees"])


if __name__ == "__main__":
    sys.exit(main())
