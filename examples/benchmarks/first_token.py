"""Times the first token of a prompt of 2048 tokens in the example engine, by backend.

    PYTHONPATH=examples:examples/serving python -m benchmarks.first_token [--out first_token.json]

The model is the shipped one, at positions that it was not trained for: only its time counts here.
Backends take turns in a random order, with another prompt in each turn; a figure is the median.
"""

import argparse
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import SHIPPED
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY
from pagedattn_serving.engine.engine import Engine

from benchmarks.machine import caption, machine, write
from benchmarks.models import model_called

PROMPT, BLOCK_SIZE = 2048, 16
TURNS = 9
LIMITS = Limits(
    num_blocks=2 * PROMPT // BLOCK_SIZE,
    block_size=BLOCK_SIZE,
    max_seq_len=PROMPT + BLOCK_SIZE,
    max_seqs=1,
    token_budget=PROMPT,
    max_query_len=PROMPT,
)
BACKENDS = {"backend=None": None, "numba": "numba", "sdpa": "sdpa", "xla": "xla"}


def first_token(backend: str | None) -> Callable[[], float]:
    """`seconds()` from the request to its first token, after the engine has compiled."""
    model, params = model_called(SHIPPED.name, {"max_position_embeddings": LIMITS.max_seq_len})
    engine, rng = Engine(params, model, LIMITS, backend), np.random.default_rng(0)
    ids = iter(range(1 << 30))

    def seconds() -> float:
        prompt = tuple(rng.integers(model.vocab_size, size=PROMPT).tolist())
        start = time.perf_counter()
        engine.submit(Request(next(ids), prompt, 1, GREEDY))
        while not engine.idle:
            engine.step()
        return time.perf_counter() - start

    seconds()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")
    arguments = parser.parse_args()
    turns = {name: first_token(backend) for name, backend in BACKENDS.items()}
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(TURNS):
        for name in random.sample(list(turns), len(turns)):
            times[name].append(turns[name]())
    about, found = machine(), {name: round(1e3 * median(taken), 1) for name, taken in times.items()}
    print(caption(about))
    for name, ms in found.items():
        print(f"{name:14}{ms:8.1f} ms to the first of a prompt of {PROMPT} tokens")
    write(arguments.out, {"machine": about, "ms": found})


if __name__ == "__main__":
    main()
