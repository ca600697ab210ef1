"""Serves a small Llama by continuous batching over a paged cache, and checks every token of it.

    python examples/demo.py
    python examples/demo.py --backend xla --model DIR --picture pool.png

The library's own choice and then every usable backend serve the same requests. All must give the
text that the model gives without any cache; otherwise the exit status is 1.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.checkpoint.tokenizer import Tokenizer, load_tokenizer
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY
from pagedattn_serving.demo.display import render
from pagedattn_serving.demo.parity import dense_scores
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.demo.report import Served, console, show_backends, show_pool, show_texts
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute, Swap
from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.families.fused import fused
from rich.live import Live

from pagedattn import InvalidInputError, explain, make_batch


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


def make_requests(tokenizer: Tokenizer, longest: int) -> list[Request]:
    """A request for each prompt; their lengths differ, as those of real requests do."""
    lengths = np.random.default_rng(0).integers(longest // 3, longest, len(PROMPTS), endpoint=True)
    return [
        Request(index, tuple(tokenizer.encode(prompt)), int(length), GREEDY)
        for index, (prompt, length) in enumerate(zip(PROMPTS, lengths, strict=True))
    ]


def announce(requests: list[Request], limits: Limits) -> None:
    """What is about to be shown."""
    console.print(
        f"{len(requests)} prompts are continued by a small Llama trained on Python's own help, "
        f"{limits.max_seqs} at a time, their keys and values in a pool of {limits.num_blocks} "
        f"blocks of {limits.block_size} tokens. Every usable backend does the same, after "
        "compiling, and must give each text that the model gives without any cache. Then come the "
        "texts, the speeds, and a picture of which request owned which block when.\n"
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", help="serve with this one alone; default: every usable one")
    parser.add_argument("--model", type=Path, default=SHIPPED, help="a Llama checkpoint's folder")
    parser.add_argument("--picture", type=Path, default=Path("block_occupancy.png"))
    parser.add_argument("--max-new-tokens", type=int, default=240, help="of the longest request")
    parser.add_argument("--num-blocks", type=int, default=96, help="size of the pool")
    parser.add_argument("--block-size", type=int, default=16, help="tokens a block")
    parser.add_argument("--max-seqs", type=int, default=8, help="requests that run at a time")
    parser.add_argument("--preemption", choices=("recompute", "swap"), default="recompute")
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    jax.config.update("jax_default_matmul_precision", "highest")  # no TF32: texts are compared
    try:
        return show(args)
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        sys.exit(f"demo.py: {error}")


def show(args: argparse.Namespace) -> int:
    """Serves on each backend and shows the results; returns the process's status."""
    model, params = load_checkpoint(args.model)
    params = fused(params)
    tokenizer = load_tokenizer(args.model)
    requests = make_requests(tokenizer, args.max_new_tokens)
    max_seq_len = max(request.max_cached for request in requests)
    limits = Limits(args.num_blocks, args.block_size, max_seq_len, args.max_seqs)
    swap = partial(Swap, num_blocks=args.num_blocks, num_rows=len(requests))
    policy = {"recompute": Recompute, "swap": swap}[args.preemption]
    announce(requests, limits)
    backends = {args.backend: args.backend} if args.backend else backends_to_show(model, limits)
    outcomes = {
        name: serve_live(name, Engine(params, model, limits, backend, policy), requests, tokenizer)
        for name, backend in backends.items()
    }
    served = next(iter(outcomes.values()))
    show_texts(requests, served, tokenizer)
    agree = show_backends(outcomes, dense_scores(params, model, requests, served.completions))
    show_pool(served, requests, limits, args.picture)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
