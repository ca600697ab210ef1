"""Serves a small Llama by continuous batching over a paged cache, and checks every token of it.

    python examples/demo.py
    python examples/demo.py --backend xla --model DIR --picture pool.png

The library's own choice and then every usable backend serve the same requests. All must give the
text that the model gives without any cache; otherwise the exit status is 1.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import jax
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.checkpoint.tokenizer import load_tokenizer
from pagedattn_serving.demo.parity import dense_scores
from pagedattn_serving.demo.report import console, show_backends, show_pool, show_texts
from pagedattn_serving.demo.run import backends_to_show, make_requests, serve_live
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute, Swap
from pagedattn_serving.families.fused import fused

INTRODUCTION = (
    "{} prompts are continued by a small Llama trained on Python's own help, {} at a time, their "
    "keys and values in a pool of {} blocks of {} tokens. Every usable backend does the same, "
    "after compiling, and must give each text that the model gives without any cache. Then come "
    "the texts, the speeds, and a picture of which request owned which block when.\n"
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
    parser.add_argument("--preemption", choices=("recompute", "swap"), default="recompute")
    return parser.parse_args()


def show(args: argparse.Namespace) -> int:
    """Serves on each backend and shows the results; returns the process's status."""
    model, params = load_checkpoint(args.model)
    params, tokenizer = fused(params), load_tokenizer(args.model)
    requests = make_requests(tokenizer, args.max_new_tokens)
    limits = Limits(args.num_blocks, max_seq_len=max(request.max_cached for request in requests))
    swap = partial(Swap, num_blocks=args.num_blocks, num_rows=len(requests))
    policy = {"recompute": Recompute, "swap": swap}[args.preemption]
    sizes = len(requests), limits.max_seqs, limits.num_blocks, limits.block_size
    console.print(INTRODUCTION.format(*sizes))
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
    jax.config.update("jax_default_matmul_precision", "highest")  # no TF32: texts are compared
    try:
        sys.exit(show(parse_args()))
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        sys.exit(f"demo.py: {error}")
