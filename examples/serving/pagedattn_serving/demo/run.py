"""Serving the demo's requests to their ends, once for each backend, with a live display."""

import time
from functools import partial

import jax.numpy as jnp
import numpy as np
from rich.live import Live

from pagedattn import InvalidInputError, explain, make_batch
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.tokenizer import Tokenizer
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY
from pagedattn_serving.demo.display import render
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.demo.report import Served, console
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.families.decoder import Decoder


def make_requests(tokenizer: Tokenizer, longest: int) -> list[Request]:
    """A request for each prompt; their lengths differ, as those of real requests do."""
    lengths = np.random.default_rng(0).integers(longest // 3, longest, len(PROMPTS), endpoint=True)
    return [
        Request(index, tuple(tokenizer.encode(prompt)), int(length), GREEDY)
        for index, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]


def serve(engine: Engine, requests: list[Request]) -> Served:
    """Runs the requests to their ends."""
    for request in requests:
        engine.submit(request)
    owners, scores, start = [], {request.id: [] for request in requests}, time.perf_counter()
    while not engine.idle:
        step = engine.step()
        if any(token.reason == "error" for token in step.tokens):
            raise InvalidInputError("the model computes NaN: numbers too large for its dtype?")
        owners.append(step.owners)
        for request, rows in step.scores.items():
            scores[request].append(rows[0])
    seconds = time.perf_counter() - start
    completions = {request.id: engine.completions.pop(request.id)[0] for request in requests}
    stacked = {request: np.stack(rows) for request, rows in scores.items()}
    counts = engine.scheduler.num_preemptions, engine.prefixes.num_hit_tokens
    num_blocks = engine.memory.num_blocks
    return Served(completions, stacked, np.stack(owners), num_blocks, seconds, *counts)


def serve_live(name: str, engine: Engine, requests: list[Request], tokenizer: Tokenizer) -> Served:
    """`serve`, after a warm-up, with a live display; prints a line about the speed at the end."""
    compile_seconds = warm_up(engine)
    view = partial(render, engine, requests, tokenizer)
    with Live(get_renderable=view, console=console, refresh_per_second=8, transient=True):
        served = serve(engine, requests)
    console.print(
        f"{name} served {len(requests)} requests in {served.seconds:.1f} s, after "
        f"{compile_seconds:.1f} s of compiling"
    )
    return served


def warm_up(engine: Engine) -> float:
    """Compiles both programs, by serving a decode and a prompt; returns the seconds it took."""
    tiny = (Request(0, prompt, 1, GREEDY) for prompt in ((0,), (0, 0)))
    return sum(serve(engine, [request]).seconds for request in tiny)


def backends_to_show(model: Decoder, limits: Limits) -> dict[str, str | None]:
    """The library's own choice and each backend that can run this model here, by names to print.

    Prints why the others cannot.
    """
    batch = make_batch([1], [0], [[0]], block_size=limits.block_size)
    cache = model.init_cache(1, limits.block_size, jnp.float32)
    query = jnp.zeros((1, model.num_attention_heads, cache.head_dim))
    reasons = explain(query, cache, batch, model.attention_spec(0))
    for name, why_not in reasons.items():
        if why_not:
            console.print(f"{name} is left out: {'; '.join(why_not)}", style="dim")
    console.print(f"backend=None takes {reasons.choice} for a new token of each request\n")
    usable = {name: name for name, why_not in reasons.items() if not why_not}
    return {"backend=None": None} | usable
