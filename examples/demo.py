"""Serves a small Llama by continuous batching over a paged cache, and checks every token of it.

    python examples/demo.py
    python examples/demo.py --backend xla --model DIR --picture pool.png

Every usable backend serves the same requests. All have to give the same text, and the text that
the model gives without any cache; otherwise the exit status is 1.
"""

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from checkpoint import load_checkpoint
from display import render
from engine import Engine
from jaxtyping import Array, Float, Int
from llama import LlamaConfig, attention_spec, forward_dense, logits_of
from occupancy import Owners, blocks_padded, blocks_used, draw_occupancy
from prompts import PROMPTS
from rich.console import Console
from rich.live import Live
from rich.table import Table
from scheduler import Limits, Request
from tokenizer import Tokenizer, load_tokenizer

from pagedattn import explain, init_kv_cache, make_batch

SHIPPED_MODEL = Path(__file__).parent / "models" / "pydoc-llama"
console = Console()


@dataclass(frozen=True)
class Served:
    """The outcome of one backend: by request, the tokens and the scores each was chosen from."""

    completions: dict[int, list[int]]
    logits: dict[int, Float[np.ndarray, "num_new vocab_size"]]
    owners: Owners
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.completions.values())) / self.seconds


def serve(engine: Engine, requests: list[Request], on_step=lambda: None) -> Served:
    """Runs the requests to their ends."""
    for request in requests:
        engine.submit(request)
    owners, logits, start = [], {request.id: [] for request in requests}, time.perf_counter()
    while not engine.idle:
        step = engine.step()
        owners.append(step.owners)
        for request_id, row in step.logits.items():
            logits[request_id].append(row)
        on_step()
    seconds = time.perf_counter() - start
    stacked = {request_id: np.stack(rows) for request_id, rows in logits.items()}
    return Served(engine.completions, stacked, np.stack(owners), seconds)


def serve_live(engine: Engine, requests: list[Request], tokenizer: Tokenizer) -> Served:
    """`serve`, on a warm engine and with a display."""
    warm_up = Request(requests[0].id, requests[0].prompt * 2, max_new_tokens=2)
    compiling = serve(engine, [warm_up]).seconds
    engine.completions = {}
    console.print(f"\n[bold]{engine.backend}[/bold]: compiled in {compiling:.1f} s")
    view = partial(render, engine, requests, tokenizer)
    with Live(get_renderable=view, console=console, refresh_per_second=8):
        return serve(engine, requests)


def usable_backends(model: LlamaConfig, limits: Limits) -> list[str]:
    """Backends that can run this model here; says why the others cannot."""
    cache = init_kv_cache(
        1, limits.block_size, model.num_key_value_heads, model.head_dim, dtype=jnp.float32
    )
    batch = make_batch([1], [0], [[0]], block_size=limits.block_size)
    query = jnp.zeros((1, model.num_attention_heads, model.head_dim))
    reasons = explain(query, cache, batch, attention_spec(model, layer=0))
    for name, why_not in reasons.items():
        if why_not:
            console.print(f"[dim]{name}: not used here, {'; '.join(why_not)}[/dim]")
    return [name for name, why_not in reasons.items() if not why_not]


@partial(jax.jit, static_argnames="model")
def dense_logits(
    params: dict, model: LlamaConfig, tokens: Int[Array, "num_requests length"]
) -> Float[Array, "num_requests length vocab_size"]:
    """Scores after every token, one request at a time, each by one uncached forward pass."""
    return jax.lax.map(lambda row: logits_of(params, forward_dense(params, model, row)), tokens)


def check_dense(params: dict, model: LlamaConfig, requests, completions) -> dict[int, np.ndarray]:
    """The dense model's scores where each token of the completions was chosen."""
    length = max(request.max_cached for request in requests)
    tokens = np.zeros((len(requests), length), np.int32)  # what follows a text cannot change it
    for row, request in zip(tokens, requests, strict=True):
        fed = [*request.prompt, *completions[request.id][:-1]]
        row[: len(fed)] = fed
    logits = np.asarray(dense_logits(params, model, tokens))
    chosen = {}
    for request, rows in zip(requests, logits, strict=True):
        first = len(request.prompt) - 1
        chosen[request.id] = rows[first : first + len(completions[request.id])]
    return chosen
