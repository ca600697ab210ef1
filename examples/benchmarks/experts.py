"""Times a mixture of experts three ways: chosen experts alone, all of them, and `ragged_dot`.

    PYTHONPATH=examples python -m benchmarks.experts --tokens 1 8 64
    PYTHONPATH=examples python -m benchmarks.experts --hidden 2880 --inner 2880 --experts 32

All three compute the same. Tokens choose experts at random.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from pagedattn_serving.families.experts import GATED, Routed, gated_experts
from pagedattn_serving.families.pieces import gated_mlp
from rich.console import Console
from rich.table import Table

from benchmarks.machine import caption, machine, write


def every_expert(layer: dict, x, routed: Routed):
    outputs = jax.vmap(lambda w: gated_mlp(w, x, jax.nn.silu))(layer)
    chosen = jax.nn.one_hot(routed.experts, len(outputs)) * routed.weights[..., None]
    return jnp.einsum("tke,eth->th", chosen.astype(x.dtype), outputs)


def ragged(layer: dict, x, routed: Routed):
    chosen = routed.experts.ravel()
    order = jnp.argsort(chosen)
    rows, sizes = x[order // routed.experts.shape[1]], jnp.bincount(chosen, length=len(layer["up"]))
    up, gate, down = (layer[name].swapaxes(1, 2) for name in ("up", "gate", "down"))
    inner = jax.nn.silu(jax.lax.ragged_dot(rows, gate, sizes)) * jax.lax.ragged_dot(rows, up, sizes)
    out = jax.lax.ragged_dot(inner, down, sizes)[jnp.argsort(order)]
    out = out.reshape(*routed.experts.shape, -1)
    return jnp.einsum("tk,tkh->th", routed.weights.astype(x.dtype), out)


WAYS = {"chosen experts": gated_experts, "every expert": every_expert, "ragged_dot": ragged}


def milliseconds(way: Callable, *arguments) -> float:
    compiled = jax.jit(way).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[3]


def case(args: argparse.Namespace, num_tokens: int) -> dict:
    keys = jax.random.split(jax.random.key(num_tokens), 6)
    up = (args.experts, args.inner, args.hidden)
    shapes = dict(zip(GATED, (up, up, (args.experts, args.hidden, args.inner)), strict=True))
    layer = {
        n: jax.random.normal(k, s) * s[-1] ** -0.5
        for k, (n, s) in zip(keys, shapes.items(), strict=False)
    }
    likely, chosen = jax.lax.top_k(
        jax.random.uniform(keys[3], (num_tokens, args.experts)), args.top_k
    )
    x = jax.random.normal(keys[4], (num_tokens, args.hidden))
    times = {
        name: milliseconds(way, layer, x, Routed(chosen, likely)) for name, way in WAYS.items()
    }
    return {"tokens": num_tokens, **times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--inner", type=int, default=512)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--out", type=Path, help="JSON")
    args = parser.parse_args()
    cases = [case(args, num_tokens) for num_tokens in args.tokens]
    sizes = {name: vars(args)[name] for name in ("hidden", "inner", "experts", "top_k")}
    data = {"machine": machine(), "sizes": sizes, "ms": cases}
    table = Table(title=f"ms a layer, {sizes}", caption=caption(data["machine"]))
    for heading in cases[0]:
        table.add_column(heading, justify="right")
    for row in cases:
        table.add_row(str(row["tokens"]), *(f"{row[name]:.2f}" for name in WAYS))
    Console().print(table)
    write(args.out, data)


if __name__ == "__main__":
    main()
