"""Times drafts that branch beside causal queries: what the masks of their lines cost.

    export PYTHONPATH=examples XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.trees [-o trees.json] [-k "64x(8 "]

By `triton` on a CUDA GPU, in CUDA graphs; else by `numba`, in jax.jit. All take turns; a figure is
the median of turns.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pagedattn_interop
import torch

import pagedattn_torch
from benchmarks import machine
from benchmarks.case import HEADS_SAID, Case, CpuCase, GpuCase
from benchmarks.chosen import chosen
from benchmarks.turns import in_turns, of_arrays, of_graphs
from pagedattn import BatchMetadata, KVCache, make_batch, paged_attention

# By contender the parents of a sequence's new tokens, from their indices.
PARENTS: dict[str, Callable[[np.ndarray], np.ndarray] | None] = {
    "causal": None,
    "a chain": lambda index: index - 1,
    "a tree": lambda index: (index - 1) // 2,  # of two children each
}
BASE = "causal"


def shapes(cuda: bool) -> dict[str, tuple[list[int], list[int]]]:
    """Query lengths and sequence lengths, by name."""
    seqs = 64 if cuda else 8
    return {
        f"{seqs}x({new} on {keys})": ([new] * seqs, [keys] * seqs)
        for new, keys in ((8, 4096), (64, 4096), (64, 1024))
    }


def branching(case: Case, batch: BatchMetadata, name: str) -> BatchMetadata:
    """The batch with a contender's parents, arrays of its own kind."""
    parents = PARENTS[name]
    if parents is None:
        return batch
    of_all = np.concatenate([parents(np.arange(n)) for n in case.query_lens])
    tables = np.zeros((batch.num_seqs, batch.max_blocks), int)  # a tree does not depend on them
    sizes = {"block_size": batch.block_size, "max_query_len": batch.max_query_len}
    lens = {"key_lens": case.seq_lens, "parents": of_all}
    tree = make_batch(case.query_lens, None, tables, **lens, **sizes).tree
    if isinstance(batch.seq_lens, torch.Tensor):
        device = batch.seq_lens.device
        tree = jax.tree.map(lambda x: pagedattn_interop.to_torch(x).to(device), tree)
    return replace(batch, tree=tree)


def require(case: Case, out: torch.Tensor, name: str) -> None:
    """ValueError if an answer is not the causal one, where a first token's must be the same."""
    if name != "a tree":
        return case.require(out)
    first = case.starts[:-1]
    got, want = out[first].float().cpu(), case.expected[first].float().cpu()
    if not (wrong := (got - want).norm() / want.norm()) < case.tolerance:
        raise ValueError(f"its answer differs by {wrong.item():.1%}")
    return None


def on_gpu(case: GpuCase, name: str) -> Callable[[], float]:
    """`seconds()` of a call, from a turn of graphs."""
    batches = [branching(case, batch, name) for batch in case.batches]
    calls = max(8, len(batches))

    def call(index):
        batch = batches[index % len(batches)]
        return pagedattn_torch.paged_attention(case.query, case.cache, batch, backend="triton")

    require(case, call(0), name)
    return of_graphs(call, calls)


def on_cpu(case: CpuCase, name: str) -> Callable[[], float]:
    """`seconds()` of a call."""
    query, cache = pagedattn_interop.to_jax((case.query, KVCache(*case.planes)))
    run, batch = jax.jit(partial(paged_attention, backend="numba")), case.batch
    batch = branching(case, batch, name)
    require(case, pagedattn_interop.to_torch(run(query, cache, batch)), name)
    return of_arrays(run, query, cache, batch)


def row_of(shape: str, us: dict[str, float | str]) -> str:
    """A line of the table: microseconds of causal queries, and the others over them."""
    base = us[BASE]
    if isinstance(base, str):
        return f"{shape:20}{base}"
    others = (us[name] for name in PARENTS if name != BASE)
    ratios = (f"{x:>10}" if isinstance(x, str) else f"{x / base:10.3f}" for x in others)
    return f"{shape:20}{base:10.1f}{''.join(ratios)}"


def run(cuda: bool, names: list[str]) -> dict:
    """The table, printed as it is measured."""
    report: dict = {"machine": machine.gpu(HEADS_SAID) if cuda else machine.cpu(HEADS_SAID)}
    print(json.dumps(report["machine"]))
    print(f"{'us, and over it':20}{''.join(f'{name:>10}' for name in PARENTS)}", flush=True)
    report["us"] = {}
    for shape, lens in shapes(cuda).items():
        if shape in names:
            case = (GpuCase if cuda else CpuCase)(shape, *lens)
            report["us"][shape] = in_turns(partial(on_gpu if cuda else on_cpu, case), PARENTS)
            print(row_of(shape, report["us"][shape]), flush=True)
            case.free()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    given = parser.parse_args()
    cuda = torch.cuda.is_available()
    report = run(cuda, chosen(parser, given.only, shapes(cuda)))
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
