"""What attention over chosen blocks gains: a decode step and its parts, beside dense attention.

    export PYTHONPATH=examples:. XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.selection [-o docs/results/selection.json] [-k "128 of 1024"]

Of each case, all in one run: dense attention over the whole context, and over one as long as what
is chosen; then the summaries' update, the scores, the choice and attention, alone and as one step.
Programs of several layers, each with summaries of its own, which are donated.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pagedattn as pa
from benchmarks.chosen import chosen
from benchmarks.machine import caption, machine, write
from benchmarks.random_arrays import random_array, random_cache
from benchmarks.timing import LAYERS, after, seconds_of_run
from benchmarks.turns import SECONDS, in_turns
from pagedattn.extend import cdiv

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128


class Case(NamedTuple):
    """Decodes of long sequences that attend to some of their blocks."""

    num_seqs: int
    length: int
    block_size: int
    chosen: int
    dtype: str = "bfloat16"
    kind: str = "range"  # of the summaries
    few: bool = False  # whether these have eight bits

    @property
    def name(self) -> str:
        blocks = f"{self.chosen} of {self.length // self.block_size} blocks of {self.block_size}"
        by = self.kind + " in eight bits" * self.few
        return f"{self.num_seqs} x {self.length}, {blocks}, {self.dtype}, by {by}"


CASES = {
    "gpu": [
        Case(16, 131072, 16, 1024),
        Case(16, 131072, 16, 1024, few=True),
        Case(16, 131072, 128, 128),
    ],
    "cpu": [
        Case(1, 131072, 16, 256),
        Case(1, 131072, 16, 256, few=True),
        Case(1, 131072, 16, 256, kind="mean"),
        Case(1, 131072, 16, 256, "float32"),
    ],
}


def decodes(case: Case, length: int) -> pa.BatchMetadata:
    """Of sequences whose blocks lie anywhere in the cache."""
    columns = cdiv(length, case.block_size)
    blocks = np.random.default_rng(0).permutation(case.num_seqs * columns)
    tables, ones = blocks.reshape(case.num_seqs, -1).tolist(), [1] * case.num_seqs
    context = [length - 1] * case.num_seqs
    return pa.make_batch(ones, context, tables, block_size=case.block_size)


def dense(query, summaries, cache, batch):
    return pa.paged_attention(query, cache, batch), summaries


def attend(selection, query, summaries, cache, batch):
    return pa.paged_attention(query, cache, batch, selection=selection), summaries


def update(query, summaries, cache, batch):
    summaries = pa.update_summaries(summaries, cache, batch)
    return waiting(query, summaries.planes[0]), summaries


def score(query, summaries, cache, batch):
    return waiting(query, pa.score_blocks(query, summaries, batch)), summaries


def choose(case, scores, query, summaries, cache, batch):
    selection = pa.select_blocks(scores + query[0, 0, 0], batch, case.chosen)
    return waiting(query, selection.blocks), summaries


def step(case, query, summaries, cache, batch):
    """What a layer does in a decode, after its keys and values are written."""
    summaries = pa.update_summaries(summaries, cache, batch)
    scores = pa.score_blocks(query, summaries, batch)
    selection = pa.select_blocks(scores, batch, case.chosen)
    return pa.paged_attention(query, cache, batch, selection=selection), summaries


def waiting(query, array):
    """The query, not known before the array is."""
    return query.at[0, 0, 0].set(array[(0,) * array.ndim].astype(query.dtype))


def seconds_of(call: Callable, held: list, query, cache, batch) -> Callable[[], float]:
    """`seconds()` of one layer's call, in programs of some that wait for one another.

    `held` are the layers' summaries. Each program is given them, and puts its own in their place.
    """

    @partial(jax.jit, donate_argnames="summaries")
    def program(query, summaries, cache, batch):
        for layer in range(LAYERS):
            query, cache = after(query, cache)
            query, summaries[layer] = call(query, summaries[layer], cache, batch)
        return query, summaries

    def run():
        out, held[:] = program(query, list(held), cache, batch)
        return out

    seconds_of_run(run, jax.block_until_ready, 1)
    runs = max(1, round(SECONDS / seconds_of_run(run, jax.block_until_ready, 1)))
    return lambda: seconds_of_run(run, jax.block_until_ready, runs) / runs / LAYERS


def measured(case: Case) -> dict[str, float | str]:
    """Microseconds of every part of a case, which take turns."""
    shape = case.num_seqs * case.length // case.block_size, case.block_size, KV_HEADS, HEAD_DIM
    cache, batch = random_cache(shape, case.dtype), decodes(case, case.length)
    query = random_array(jax.random.key(1), (case.num_seqs, HEADS, HEAD_DIM), case.dtype)
    dtype = "float8_e4m3fn" if case.few else None
    summaries = jax.jit(partial(pa.summarise_blocks, kind=case.kind, dtype=dtype))(cache, batch)
    scores = jax.jit(pa.score_blocks)(query, summaries, batch)
    selection = pa.select_blocks(scores, batch, case.chosen)
    few = decodes(case, case.chosen * case.block_size)
    parts = {
        "dense, as short": (dense, few),
        "dense": (dense, batch),
        "summaries": (update, batch),
        "scores": (score, batch),
        "choice": (partial(choose, case, scores), batch),
        "attention": (partial(attend, selection), batch),
        "step": (partial(step, case), batch),
    }
    held = [jax.tree.map(jnp.copy, summaries) for _ in range(LAYERS)]
    return in_turns(
        lambda name: seconds_of(parts[name][0], held, query, cache, parts[name][1]), parts
    )


def ratios_of(times: dict) -> str:
    attention, step = times["attention"] / times["dense, as short"], times["dense"] / times["step"]
    return (
        f"  attention {attention:.3f} of a dense one as short; "
        f"the step {step:.2f} times as fast as dense"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    cases = CASES["cpu" if jax.default_backend() == "cpu" else "gpu"]
    names = chosen(parser, arguments.only, [case.name for case in cases])
    about, rows = machine(), {}
    print(caption(about))
    for case in cases:
        if case.name in names:
            rows[case.name] = times = measured(case)
            print(case.name, times)
            print(ratios_of(times), flush=True)
            write(arguments.out, {"machine": about, "microseconds": rows})


if __name__ == "__main__":
    main()
