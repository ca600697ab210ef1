"""Times whole decode steps of a model, as shares of the time that reading their bytes takes.

    PYTHONPATH=examples python -m benchmarks.whole_step --shape llama-8b --out whole_step.json
    PYTHONPATH=examples python -m benchmarks.whole_step --cases 4x64 --steps 4

A case is BATCHxCONTEXT: so many sequences with so many cached tokens each, of random keys and
values. `engine/generation.py: decode_loop`, one program, decodes them. A step has to read the
weights and the cache; how fast the device copies is measured in the same run. The roofline takes
into account that products of many rows are bound by arithmetic.
"""

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import median
from typing import NamedTuple

import jax
import jax.numpy as jnp
from pagedattn_serving.engine.generation import Generation, decode_loop
from pagedattn_serving.families.decoder import Decoder
from rich.console import Console
from rich.table import Table

from benchmarks.machine import caption, machine, write
from benchmarks.models import add_arguments, model_called
from benchmarks.random_arrays import BLOCK_SIZE, random_cache
from pagedattn import BlockPool, append_tokens, init_block_pool
from pagedattn.extend import cdiv

WARM_UP = 2  # steps, of which the first compiles
CASES = {"llama-8b": ["64x4096", "1x1024", "8x2048", "256x1024"]}
HEADINGS = (
    "batch x context",
    "ms a step",
    "tokens/s",
    "GB read",
    "ms to read them",
    "share",
    "of the roofline",
)


def filled(model: Decoder, params: dict, lengths: list[int], new_tokens: int) -> Generation:
    """Sequences with so many cached tokens each, of random keys and values in scattered blocks."""
    num_seqs, max_blocks = len(lengths), cdiv(max(lengths) + new_tokens + 1, BLOCK_SIZE)
    num_blocks = sum(cdiv(length + new_tokens + 1, BLOCK_SIZE) for length in lengths)
    cached = jnp.array(lengths, jnp.int32)
    pool = scattered_pool(cached, num_blocks, max_blocks)
    layers = range(model.num_hidden_layers)
    shape = (num_blocks, BLOCK_SIZE, model.num_key_value_heads, model.head_dim)
    return Generation(
        pool=pool,
        caches=[random_cache(shape, params["embedding"].dtype, seed=layer) for layer in layers],
        tokens=jnp.zeros((num_seqs, max(lengths) + new_tokens + 1), jnp.int32),
        lengths=cached + 1,
        ends=cached + 1 + new_tokens,
        live=jnp.ones(num_seqs, bool),
        starved=jnp.zeros(num_seqs, bool),
        seeds=jnp.zeros(num_seqs, jnp.int32),
    )


@partial(jax.jit, static_argnums=(1, 2))
def scattered_pool(lengths, num_blocks: int, max_blocks: int) -> BlockPool:
    pool = init_block_pool(num_blocks, BLOCK_SIZE, max_seqs=len(lengths), max_blocks=max_blocks)
    order = jax.random.permutation(jax.random.key(2), num_blocks).astype(jnp.int32)
    return append_tokens(replace(pool, free_blocks=order), lengths)[0]


def seconds_a_step(
    model: Decoder, params: dict, lengths: list[int], steps: int, backend: str | None, runs: int = 3
) -> float:
    """Of `decode_loop` taking the likeliest tokens: the median of some runs of so many steps."""
    state = filled(model, params, lengths, WARM_UP + runs * steps)
    run = partial(decode_loop, params, model, temperature=None, backend=backend)
    state = run(state=state, max_steps=WARM_UP)  # called as it is timed, or JAX compiles it again
    seconds, state = median_of_runs(partial(run, max_steps=steps), state, runs)
    if not bool(state.lengths.sum() == state.ends.sum()):
        raise RuntimeError("a sequence ended early, so that steps were not of the whole batch")
    return seconds / steps


def median_of_runs(
    run: Callable[..., Generation], state: Generation, runs: int
) -> tuple[float, Generation]:
    """Seconds of `run(state=state)`, which goes on from one run to the next, and the last state."""
    times, state = [], jax.block_until_ready(state)
    for _ in range(runs):
        start = time.perf_counter()
        state = jax.block_until_ready(run(state=state))
        times.append(time.perf_counter() - start)
    return median(times), state


class Needs(NamedTuple):
    """What a decode step cannot do without."""

    weight_bytes: int  # of all weights that are read
    cache_bytes: int  # of the cached keys and values
    operations: int  # floating-point, of the products with the weights

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes

    def roofline(self, bytes_s: float, operations_s: float) -> float:
        """Seconds at best: products read weights while they compute, attention comes between."""
        products = max(self.weight_bytes / bytes_s, self.operations / operations_s)
        return products + self.cache_bytes / bytes_s


def needs_of_a_step(model: Decoder, params: dict, lengths: list[int]) -> Needs:
    """A step of sequences with so many cached tokens each."""
    table = params["embedding"]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if "lm_head" in params:  # then only a row a sequence of the embedding is read
        weights -= table.nbytes
    token = 2 * model.num_key_value_heads * model.head_dim * table.dtype.itemsize
    return Needs(
        weight_bytes=weights,
        cache_bytes=sum(lengths) * token * model.num_hidden_layers,
        operations=2 * len(lengths) * weights // table.dtype.itemsize,
    )


def measure(model: Decoder, params: dict, case: str, args: argparse.Namespace, about: dict) -> dict:
    """One case, on a machine described by `about`."""
    batch, context = map(int, case.split("x"))
    seconds = seconds_a_step(model, params, [context] * batch, args.steps, args.backend)
    middle = context + args.steps * 3 // 2  # the cache grows while it is measured
    needs = needs_of_a_step(model, params, [middle] * batch)
    copy_s, product_s = 1e9 * about["copy_gb_s"], 1e12 * about["product_tflop_s"]
    return {
        "case": case,
        "ms": 1e3 * seconds,
        "tokens_s": batch / seconds,
        "gb_read": needs.bytes / 1e9,
        "ms_to_read": 1e3 * needs.bytes / copy_s,
        "share": needs.bytes / copy_s / seconds,
        "of_roofline": needs.roofline(copy_s, product_s) / seconds,
    }


def table_of(data: dict) -> Table:
    table = Table(title=f"Decode steps of {data['model']}", caption=caption(data["machine"]))
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in data["cases"]:
        table.add_row(
            row["case"],
            f"{row['ms']:.2f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['gb_read']:.2f}",
            f"{row['ms_to_read']:.2f}",
            f"{row['share']:.2f}",
            f"{row['of_roofline']:.2f}",
        )
    return table


def cases_of(text: str) -> list[str]:
    cases = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d*x[1-9]\d*", case) for case in cases):
        raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxCONTEXT, such as 4x64")
    return cases


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--cases", type=cases_of, help="BATCHxCONTEXT, separated by commas")
    parser.add_argument("--steps", type=int, default=24, help="of each of three runs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict:
    args = parse_args(arguments)
    about = machine()
    model, params = model_called(args.shape, dict(args.size))
    data = {"machine": about, "model": args.shape, "sizes": dict(args.size), "cases": []}
    for case in args.cases or CASES.get(args.shape, ["8x256", "1x256"]):
        row = measure(model, params, case, args, about)
        data["cases"].append(row)
        print(f"{case}: {row['ms']:.2f} ms a step, {row['share']:.2f}", flush=True)
        write(args.out, data)
    Console(markup=False).print(table_of(data))
    return data


if __name__ == "__main__":
    main()
