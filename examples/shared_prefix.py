"""Decoding 64 sequences behind one prompt: its keys read once, or once for each sequence.

    python examples/shared_prefix.py

Both programs compute the same; the tables alone say which blocks are shared.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from pagedattn import KVCache, cascade_attention, make_batch, paged_attention, split_prefix
from pagedattn.extend import cdiv

BLOCK_SIZE = 16


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Median seconds of a decode step's attention in one layer, for each program."""
    options = parsed(arguments)
    query, cache, batch = step(options)
    programs = {
        "paged_attention": jax.jit(functools.partial(paged_attention, return_lse=True)),
        "cascade_attention": jax.jit(cascade),
    }
    runs = {name: functools.partial(p, query, cache, batch) for name, p in programs.items()}
    outs = [run()[0].astype(jnp.float32) for run in runs.values()]
    gap = float(jnp.abs(outs[0] - outs[1]).max())
    seconds = medians(runs, options.repeats)
    report(options, seconds, gap)
    return seconds


def parsed(arguments):
    parser = argparse.ArgumentParser(description="Decoding behind a shared prompt.")
    parser.add_argument("--seqs", type=int, default=64)
    parser.add_argument("--prefix", type=int, default=8192, help="shared tokens")
    parser.add_argument("--suffix", type=int, default=128, help="tokens of each sequence's own")
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("Q", "KV"))
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args(arguments)


def step(options) -> tuple[jax.Array, KVCache, object]:
    """Query, cache and batch of one decode step, in bfloat16."""
    shared, own = options.prefix // BLOCK_SIZE, cdiv(options.suffix, BLOCK_SIZE)
    first = [shared + s * own for s in range(options.seqs)]
    tables = [[*range(shared), *range(start, start + own)] for start in first]
    contexts = [shared * BLOCK_SIZE + options.suffix - 1] * options.seqs
    batch = make_batch([1] * options.seqs, contexts, tables, block_size=BLOCK_SIZE)
    heads, kv_heads = options.heads
    shape = (shared + options.seqs * own, BLOCK_SIZE, kv_heads, options.head_dim)
    keys = jax.random.split(jax.random.key(0), 3)
    key, value = (jax.random.normal(each, shape, jnp.bfloat16) for each in keys[:2])
    query = jax.random.normal(keys[2], (options.seqs, heads, options.head_dim), jnp.bfloat16)
    return query, KVCache(key, value), batch


def cascade(query, cache, batch):
    return cascade_attention(query, cache, *split_prefix(batch))


def medians(runs, repeats: int) -> dict[str, float]:
    """Each run's median time, the runs taking turns."""
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) for name, each in times.items()}


def report(options, seconds, gap):
    plain, cascade = seconds.values()
    table = Table(title=f"{options.seqs} sequences over {options.prefix} shared tokens", box=None)
    table.add_column("")
    table.add_column("ms a step and layer", justify="right")
    for name, each in seconds.items():
        table.add_row(name, f"{1000 * each:.2f}")
    console = Console()
    console.print(table)
    device = jax.devices()[0].device_kind
    console.print(f"{plain / cascade:.1f} times as fast, largest difference {gap:.4f}, on {device}")


if __name__ == "__main__":
    main()
