"""A decode loop in one compiled program, against the same step called from Python.

    python examples/decode_loop.py

Both run the same step (engine/generation.py of the example engine). In the stepped loop Python asks
after each token whether any sequence goes on: a round trip to the host. Neither may move a cache in
memory, for then a step would copy it, nor change a token: else the exit status is 1.
"""

import sys
import time
from collections.abc import Callable

import jax
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.checkpoint.tokenizer import load_tokenizer
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.engine.generation import Generation, decode_loop, decode_step, prefill, start
from pagedattn_serving.families.fused import fused

Loop = Callable[[Generation], tuple[Generation, int]]


def loops(params, model, backend: str | None) -> dict[str, Loop]:
    """Functions from prefilled sequences to complete ones, and how often they ask the device."""

    def compiled(state: Generation) -> tuple[Generation, int]:
        longest = state.tokens.shape[1]
        return decode_loop(params, model, state, None, longest, backend), 1

    def stepped(state: Generation) -> tuple[Generation, int]:
        steps = 0
        while state.live.any():
            state, steps = decode_step(params, model, state, None, backend), steps + 1
        return state, steps + 1

    return {"compiled": compiled, "stepped": stepped}


def pointers(state: Generation) -> list[int]:
    """Where the keys and values of every layer lie."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.caches)]


def main(new_tokens: int = 100, num_blocks: int = 4096, backend: str | None = None) -> int:
    model, params = load_checkpoint(SHIPPED)
    params, encode = fused(params), load_tokenizer(SHIPPED).encode
    prompts = [encode(prompt) for prompt in PROMPTS[:4]]
    texts, all_in_place = [], True
    for name, loop in loops(params, model, backend).items():
        for _ in range(2):  # the first time compiles
            sizes = {"max_new_tokens": new_tokens, "num_blocks": num_blocks}
            state = start(params, model, prompts, [0] * len(prompts), **sizes)
            state = prefill(params, model, state, None, max(map(len, prompts)), backend)
            before, begin = pointers(state), time.perf_counter()
            state, trips = loop(state)
            jax.block_until_ready(state)
            ms = 1e3 * (time.perf_counter() - begin) / (new_tokens - 1)
        in_place = pointers(state) == before
        print(f"{name}: {ms:.2f} ms a token, {trips} round trips, in place: {in_place}")
        texts.append(state.tokens.tolist())
        all_in_place &= in_place
    return 0 if texts[0] == texts[1] and all_in_place else 1


if __name__ == "__main__":
    sys.exit(main())
