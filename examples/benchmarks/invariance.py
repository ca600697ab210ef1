"""Times `batch_invariant=True` beside the default, and counts the bits that company changes.

    export PYTHONPATH=examples XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.invariance [-o invariance.json] [-k decode] [-c "batch_invariant"]

By `triton` on a CUDA GPU, in CUDA graphs; else by `numba`, in jax.jit. Contenders take turns; a
figure is the median of a contender's turns. On a GPU some contenders are the mode with other rules
for its programs, named in `RULES`: which rules are best is read off this table.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from unittest import mock

import jax
import numpy as np
import pagedattn_interop
import torch

import pagedattn_torch
from benchmarks import machine
from benchmarks.case import HEAD_DIM, HEADS, HEADS_SAID, KV_HEADS, Case, CpuCase, GpuCase
from benchmarks.report import reason_of
from benchmarks.timing import captured
from pagedattn import KVCache, make_batch, paged_attention
from pagedattn._kernels.triton import tiling as rules
from pagedattn._kernels.triton.programs import Program, is_short
from pagedattn.extend import cdiv
from pagedattn_torch.arrays import batch_on

DEFAULT, MODE = "default", "batch_invariant"
TURNS, SECONDS = 9, 0.015  # of each contender: turns, and seconds of a turn at least
BLOCK_SIZE = 16
# Sequences of the check of bits: some end within a segment or a step, or are one of them.
LENGTHS = (1, 77, 128, 513, 1500, 2048, 4300)


def shapes() -> dict[str, tuple[list[int], list[int]]]:
    """Query lengths and sequence lengths, by name."""
    lengths = np.random.default_rng(1).integers(512, 4096, 64, endpoint=True).tolist()
    return {
        "decode 64x4096": ([1] * 64, [4096] * 64),
        "decode 8x4096": ([1] * 8, [4096] * 8),
        "decode 1x1024": ([1], [1024]),
        "decode 256x1024": ([1] * 256, [1024] * 256),
        "decode 64x(512 to 4096)": ([1] * 64, lengths),
        "decode 1x32768": ([1], [32768]),
        "verify 64x(8 on 4096)": ([8] * 64, [4096] * 64),
        "verify 8x(8 on 4096)": ([8] * 8, [4096] * 8),
        "prefill 1x2048": ([2048], [2048]),
        "prefill 2x8192": ([8192] * 2, [8192] * 2),
        "prefill 4x512": ([512] * 4, [512] * 4),
    }


def cpu_shapes() -> dict[str, tuple[list[int], list[int]]]:
    return {
        "decode 8x4096": ([1] * 8, [4096] * 8),
        "decode 1x32768": ([1], [32768]),
        "decode 64x512": ([1] * 64, [512] * 64),
        "verify 8x(8 on 4096)": ([8] * 8, [4096] * 8),
        "prefill 1x2048": ([2048], [2048]),
        "prefill 4x512": ([512] * 4, [512] * 4),
        "mixed": ([256, 256] + [1] * 6, [256, 2048] + [2048] * 6),
    }


def steps_of_64(rows, call, device) -> Program:
    """Half as many keys a step, and more stages where loads take the time."""
    stages = 5 if is_short(call) and rows <= 16 else 3
    return Program(rows, 64, 8 if rows > 64 else 4, stages)


def more_stages(rows, call, device) -> Program:
    program = PROGRAM(rows, call, device)
    return program._replace(num_stages=4) if is_short(call) else program


def rows_of_64(call, device) -> int:
    """The products of all query lengths by the same instructions, whose rows decodes waste."""
    return 64 if is_short(call) else 128


def small_prompts(call, device) -> int:
    """Two programs of a prompt on each multiprocessor."""
    return 64 if not is_short(call) else ROWS(call, device)


def two_stages(rows, call, device) -> Program:
    program = PROGRAM(rows, call, device)
    return program if is_short(call) else program._replace(num_stages=2)


PROGRAM, ROWS = rules.invariant_program, rules.invariant_rows
RULES: dict[str, dict[str, Callable]] = {
    MODE: {},
    "steps of 64": {"invariant_program": steps_of_64},
    "4 stages": {"invariant_program": more_stages},
    "rows of 64": {"invariant_rows": rows_of_64},
    "prompts of 64 rows": {"invariant_rows": small_prompts, "invariant_program": two_stages},
    "64 rows, steps of 64": {"invariant_rows": small_prompts, "invariant_program": steps_of_64},
}
FOR_PROMPTS = "prompts of 64 rows", "64 rows, steps of 64"
FOR_DECODES = "4 stages", "rows of 64"


@contextmanager
def ruled(name: str) -> Iterator[None]:
    """The programs of the mode follow other rules."""
    with ExitStack() as stack:
        for rule, other in RULES.get(name, {}).items():
            stack.enter_context(mock.patch.object(rules, rule, other))
        yield


def attend(query, cache, batch, name: str, **options):
    return pagedattn_torch.paged_attention(
        query, cache, batch, backend="triton", batch_invariant=name != DEFAULT, **options
    )


def on_gpu(case: GpuCase, name: str) -> Callable[[], float]:
    """`seconds()` of a call, from a turn of graphs."""
    calls = max(8, len(case.batches))

    def call(index):
        return attend(case.query, case.cache, case.batches[index % len(case.batches)], name)

    with ruled(name):
        right = attend(case.query, case.cache, case.batches[0], DEFAULT).float()
        wrong = (call(0).float() - right).norm() / right.norm()
        if not wrong < case.tolerance:
            raise ValueError(f"its answer differs by {wrong.item():.1%}")
        graph = captured(call, calls)
    once = graph_seconds(graph, 3) / 3
    replays = max(1, round(SECONDS / once))
    return lambda: graph_seconds(graph, replays) / replays / calls


def graph_seconds(graph, replays: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def on_cpu(case: CpuCase, name: str) -> Callable[[], float]:
    """`seconds()` of a call."""
    query, cache = pagedattn_interop.to_jax((case.query, KVCache(*case.planes)))
    mode = {"backend": "numba", "batch_invariant": name != DEFAULT}
    run, batch = jax.jit(partial(paged_attention, **mode)), case.batch
    case.require(pagedattn_interop.to_torch(run(query, cache, batch)))

    def seconds() -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(query, cache, batch))
        return time.perf_counter() - start

    return seconds


def measured(case: Case, prepare: Callable, names: list[str]) -> dict[str, float | str]:
    """Microseconds of each contender, or why there are none."""
    found: dict[str, float | str] = {}
    calls, times = {}, {}
    for name in names:
        try:
            calls[name], times[name] = prepare(case, name), []
        except Exception as error:
            found[name] = reason_of(error)
    for _ in range(TURNS):
        for name, call in calls.items():
            times[name].append(call())
    return found | {name: round(1e6 * median(taken), 2) for name, taken in times.items()}


def contenders(case: Case, wanted: str) -> list[str]:
    """The default, and the rules that change something for a case."""
    others = FOR_PROMPTS if case.decode else FOR_DECODES
    names = [name for name in RULES if name not in others]
    return [DEFAULT, *(name for name in names if wanted in name)]


class Sequences:
    """A cache of sequences of `LENGTHS`, and queries of all their tokens."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        counts = [cdiv(n, BLOCK_SIZE) for n in LENGTHS]
        options = {"device": "cuda", "dtype": torch.bfloat16}
        plane = sum(counts), BLOCK_SIZE, KV_HEADS, HEAD_DIM
        self.cache = KVCache(torch.randn(plane, **options), torch.randn(plane, **options))
        self.queries = [torch.randn(n, HEADS, HEAD_DIM, **options) for n in LENGTHS]
        self.tables = [ids.tolist() for ids in torch.randperm(sum(counts)).split(counts)]

    def results(self, seqs: list[int], last: int, stop: int, name: str) -> list[torch.Tensor]:
        """out and lse of the last tokens of sequences in one call, from which `stop` are cut."""
        lens = [max(1, LENGTHS[seq] - stop) for seq in seqs]
        counts = [min(last, n) for n in lens]
        query = [self.queries[s][n - q : n] for s, n, q in zip(seqs, lens, counts, strict=True)]
        tables = [
            self.tables[seq][: cdiv(n, BLOCK_SIZE)] for seq, n in zip(seqs, lens, strict=True)
        ]
        width = max(map(len, tables))
        tables = [row + [-1] * (width - len(row)) for row in tables]
        batch = make_batch(counts, None, tables, key_lens=lens, block_size=BLOCK_SIZE)
        batch = batch_on(batch, "cuda")
        with ruled(name):
            out, lse = attend(torch.cat(query), self.cache, batch, name, return_lse=True)
        rows = torch.cat([out.float(), lse[..., None]], -1)
        return list(rows.split(counts))


def differing(name: str) -> dict[str, int]:
    """How many numbers of out and lse change with the company of a token, by the kind of call."""
    sequences, every = Sequences(), list(range(len(LENGTHS)))
    whole = sequences.results(every, max(LENGTHS), 0, name)
    ways = {
        "decodes": [(every, 1, 0)],
        "decodes alone": [([seq], 1, 0) for seq in every],
        "decodes, 64 of them": [(every * 9, 1, 0)],
        "drafts of 8": [(every, 8, 0)],
        "drafts of 8 alone": [([seq], 8, 0) for seq in every],
        "chunks of 40": [(every, 40, 0)],
        "chunks of 300 that end before": [(every, 300, 55)],
        "prompts alone": [([seq], max(LENGTHS), 0) for seq in every],
    }
    counts, numbers = {}, 0
    for way, calls in ways.items():
        counts[way] = 0
        for seqs, last, stop in calls:
            for seq, got in zip(seqs, sequences.results(seqs, last, stop, name), strict=True):
                end = max(1, LENGTHS[seq] - stop)
                want = whole[seq][end - len(got) : end]
                counts[way] += int((got.view(torch.int32) != want.view(torch.int32)).sum())
                numbers += got.numel()
    return counts | {"of": numbers}


def products_differ() -> int:
    """Numbers that differ between products of 16 rows and of 64: other instructions on Hopper."""
    import triton

    from benchmarks.products import product_kernel

    torch.manual_seed(0)
    a, b = (torch.randn(64, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    few, many = (torch.empty(64, 64, device="cuda") for _ in range(2))
    for rows, out in ((16, few), (64, many)):
        product_kernel[(triton.cdiv(64, rows),)](a, b, out, ROWS=rows, num_warps=4)
    return int((few != many).sum())


def row_of(case: Case, us: dict[str, float | str], names: list[str]) -> str:
    """A line of the table: the default's time, and the others' over it."""
    base = us[DEFAULT]
    cells = [f"{base:10.1f}" if isinstance(base, float) else f"{base:>10}"]
    for name in names:
        found = us.get(name, "")
        ratio = isinstance(found, float) and isinstance(base, float)
        cells.append(f"{found / base:>{len(name)}.3f}" if ratio else f"{'':{len(name)}}")
    return f"{case.shape:26}" + "  ".join(cells)


def run(cuda: bool, only: str, wanted: str, seconds: float) -> dict:
    """The table, printed as it is measured."""
    ends = time.monotonic() + seconds
    report: dict = {"about": machine.gpu(HEADS_SAID) if cuda else machine.cpu(HEADS_SAID)}
    print(json.dumps(report["about"]))
    wanted = wanted if cuda else MODE
    names = [name for name in RULES if wanted in name]
    print(f"{'us, and over it':26}{DEFAULT:>10}  " + "  ".join(names), flush=True)
    report["us"] = {}
    for shape, lens in (shapes() if cuda else cpu_shapes()).items():
        if only in shape and time.monotonic() < ends:
            case = (GpuCase if cuda else CpuCase)(shape, *lens)
            prepare = on_gpu if cuda else on_cpu
            report["us"][shape] = measured(case, prepare, contenders(case, wanted))
            print(row_of(case, report["us"][shape], names), flush=True)
            for name, found in report["us"][shape].items():
                if isinstance(found, str):
                    print(f"  {name}: {found}", flush=True)
            case.free()
    if cuda:
        report["products that differ"] = products_differ()
        print("products of 16 rows that differ from those of 64:", report["products that differ"])
        report["differing"] = {}
        for name in [name for name in names if time.monotonic() < ends]:
            report["differing"][name] = differing(name)
            print(f"{name}: numbers that differ", report["differing"][name], flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="write the figures there, as JSON")
    parser.add_argument("-k", "--only", default="", help="cases whose name contains this")
    parser.add_argument("-c", "--contenders", default="", help="rules whose name contains this")
    parser.add_argument("--seconds", type=float, default=130, help="after which none is begun")
    given = parser.parse_args()
    report = run(torch.cuda.is_available(), given.only, given.contenders, given.seconds)
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
