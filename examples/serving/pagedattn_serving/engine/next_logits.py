"""The forward of an engine's step, as one program that is compiled for each shape of a step."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pagedattn import AttentionSpec, BlockPool, batch_from_pool
from pagedattn.extend import sequence_ids
from pagedattn_serving.blocks.memory import Caches, by_layer, by_pool
from pagedattn_serving.decoding.request import IN_FLIGHT
from pagedattn_serving.families.decoder import Decoder, Tokens
from pagedattn_serving.families.forward import cached_attention, forward_paged

STATIC = ("model", "max_query_len", "backend", "batch_invariant")


@partial(jax.jit, static_argnames=STATIC, donate_argnames="caches")
def next_logits(
    params: dict,
    model: Decoder,
    tokens: Tokens,
    last: Int[Array, " max_seqs"],
    caches: Caches,
    pools: list[BlockPool],
    query_lens: Int[Array, " max_seqs"],
    sources: Int[Array, " max_seqs"],
    max_query_len: int,
    backend: str | None,
    batch_invariant: bool,
) -> tuple[Float[Array, "max_seqs vocab_size"], Caches]:
    """Scores after the last token of the row `sources[s]`, for each s; caches change in place.

    `last` has the token of each row that is `IN_FLIGHT` in `tokens`.
    """
    shapes = {"num_tokens": len(tokens), "max_query_len": max_query_len}
    batches = [batch_from_pool(pool, query_lens, **shapes) for pool in pools]
    batch, by_window = batches[0], dict(zip(dict.fromkeys(model.windows), batches, strict=True))

    def attend(operands, cache, _, spec: AttentionSpec, backend):
        own = by_window[spec.sliding_window]
        return cached_attention(operands, cache, own, spec, backend, batch_invariant)

    rows = sequence_ids(batch.query_start_loc, len(tokens))
    tokens = jnp.where(tokens == IN_FLIGHT, last[rows], tokens)
    layers = by_layer(model.windows, caches)
    hidden, layers = forward_paged(params, model, tokens, layers, batch, backend, attend)
    ends = batch.query_start_loc[1:] - 1
    return model.logits(params, hidden[ends[sources]]), by_pool(model.windows, layers)
