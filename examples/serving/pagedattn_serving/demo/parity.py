"""Runs the model without a cache, to judge what was served."""

from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pagedattn_serving.decoding.request import Request
from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.families.forward import forward_dense

Scores = dict[
    int, Float[np.ndarray, "num_new vocab_size"]
]  # for each request, the logits that its new tokens were chosen from


def dense_scores(
    params: dict, model: Decoder, requests: list[Request], completions: dict[int, list[int]]
) -> Scores:
    """The uncached model's logits wherever a token of the completions was chosen."""
    texts = [[*request.prompt, *completions[request.id][:-1]] for request in requests]
    tokens = np.zeros(
        (len(texts), max(map(len, texts))), np.int32
    )  # padding comes last, and attention is causal
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    logits = np.asarray(dense_logits(params, model, tokens))
    return {
        request.id: rows[len(request.prompt) - 1 : len(text)]
        for request, text, rows in zip(requests, texts, logits, strict=True)
    }


@partial(jax.jit, static_argnames="model")
def dense_logits(
    params: dict, model: Decoder, tokens: Int[Array, "num_requests length"]
) -> Float[Array, "num_requests length vocab_size"]:
    """Logits after every token; each request by a plain forward pass of its own."""
    return jax.lax.map(lambda row: model.logits(params, forward_dense(params, model, row)), tokens)


def greedy(scores: Scores) -> dict[int, list[int]]:
    """The likeliest tokens: equal to the completions if the two models agree."""
    return {request: rows.argmax(axis=-1).tolist() for request, rows in scores.items()}


def largest_difference(ours: Scores, theirs: Scores) -> float:
    """The largest difference in any logit; infinite if texts differ in length."""
    if any(ours[request].shape != theirs[request].shape for request in ours):
        return float("inf")
    return max(float(np.abs(ours[request] - theirs[request]).max()) for request in ours)
