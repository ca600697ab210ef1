"""A tiny random Llama, and requests that are too many for its pool at once."""

import functools
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import save_checkpoint
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY
from pagedattn_serving.engine.engine import Engine, Step
from pagedattn_serving.families.llama import Llama
from pagedattn_serving.training.initial import init_params, large_params

from pagedattn import available_backends

# XLA compiles ten times as long as torch, so it serves only where its attention is what is tested.
QUICK = "sdpa" if "sdpa" in available_backends() else "xla"
TINY = Llama(
    vocab_size=31,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)
LIMITS = Limits(
    num_blocks=14, block_size=4, max_seq_len=40, max_seqs=4, token_budget=12, max_query_len=8
)
ROOMY = Limits(
    num_blocks=60, block_size=4, max_seq_len=40, max_seqs=6, token_budget=12, max_query_len=8
)


@functools.cache
def tiny_params() -> dict:
    with jax.ensure_compile_time_eval():  # for the first call may be made while something traces
        return large_params(TINY, jax.random.key(0))


def saved_tiny(folder: Path) -> Path:
    """The folder, with a checkpoint of such a model whose tokens are bytes."""
    model = replace(TINY, vocab_size=256)
    with jax.ensure_compile_time_eval():
        save_checkpoint(folder, model, init_params(model, jax.random.key(0)))
    return folder


def tiny_requests(lengths=(1, 25, 3, 9, 8, 2, 17, 30, 5), decoding=GREEDY) -> list[Request]:
    """Random prompts of these lengths, some shorter and some longer than a chunk."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(TINY.vocab_size, size=length).tolist()) for length in lengths]
    return [Request(i, prompt, 4 + i % 7, decoding) for i, prompt in enumerate(prompts)]


def serve(engine: Engine, requests: list[Request]) -> list[Step]:
    """The steps of serving them all."""
    for request in requests:
        engine.submit(request)
    steps = []
    while not engine.idle:
        steps.append(engine.step())
    return steps


def greedy_completions(engine: Engine) -> dict[int, list[int]]:
    """The one completion of each request."""
    return {request: completion for request, (completion,) in engine.completions.items()}
