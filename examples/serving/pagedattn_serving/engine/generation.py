"""A whole generation in one compiled program: the host sees no token before all are there.

`lax.while_loop` carries the pool and the caches. Both are donated, so every step writes them in
place. A step appends tokens to the pool, runs the model, samples, and decides which sequences go
on. No sequences share a block here, so that no step has to look for copies to make on writing.
`decode_step` is one such step by itself, for a loop in Python to compare with.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pagedattn import BatchMetadata, BlockPool, KVCache, init_block_pool, next_batch
from pagedattn.extend import cdiv, sequence_ids
from pagedattn_serving.decoding.sampling_device import greedy_rows, pick
from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.families.forward import cached_attention, forward_paged

STATIC = ("model", "backend", "attend")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Generation:
    """The state of a generation: a pytree that `jax.jit` can donate.

    Fields:
      pool, caches: the cached tokens; row s of the pool is sequence s, whose blocks are its own.
      tokens: prompts and completions, one row a sequence, 0 past their ends.
      lengths: the number of tokens of each sequence; the cache holds all but the last.
      ends: the length at which each sequence is full.
      live: which sequences go on; ended ones keep their blocks, so that they could be continued.
      starved: which sequences ended because no block was free.
      seeds: the seed of each sequence's noise.
    """

    pool: BlockPool
    caches: list[KVCache]
    tokens: Int[Array, "num_seqs max_len"]
    lengths: Int[Array, " num_seqs"]
    ends: Int[Array, " num_seqs"]
    live: Bool[Array, " num_seqs"]
    starved: Bool[Array, " num_seqs"]
    seeds: Int[Array, " num_seqs"]


def start(
    params: dict,
    model: Decoder,
    prompts: list[list[int]],
    seeds: list[int],
    *,
    max_new_tokens: int,
    num_blocks: int,
    block_size: int = 16,
) -> Generation:
    """Sequences in an empty pool, none of their tokens cached: `prefill` them next."""
    lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    num_seqs, max_len = len(prompts), max(map(len, prompts)) + max_new_tokens
    max_blocks = cdiv(max_len, block_size)
    dtype = params["embedding"].dtype
    padded = [prompt + [0] * (max_len - len(prompt)) for prompt in prompts]
    return Generation(
        pool=init_block_pool(num_blocks, block_size, max_seqs=num_seqs, max_blocks=max_blocks),
        caches=[model.init_cache(num_blocks, block_size, dtype) for _ in params["layers"]],
        tokens=jnp.array(padded, jnp.int32),
        lengths=lengths,
        ends=lengths + max_new_tokens,
        live=jnp.ones(num_seqs, bool),
        starved=jnp.zeros(num_seqs, bool),
        seeds=jnp.array(seeds, jnp.int32),
    )


@partial(jax.jit, static_argnames=(*STATIC, "max_query_len"), donate_argnames="state")
def prefill(
    params: dict,
    model: Decoder,
    state: Generation,
    temperature: Float[Array, ""] | None,
    max_query_len: int,
    backend: str | None = None,
    attend: Callable = cached_attention,
) -> Generation:
    """Caches the prompts, of `max_query_len` tokens at most, and appends the first new token.

    It is drawn at the temperature; None takes the likeliest, as 0 does, and makes no noise for it.
    """
    return _advance(params, model, state, temperature, max_query_len, backend, attend)


@partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
def decode_step(
    params: dict,
    model: Decoder,
    state: Generation,
    temperature: Float[Array, ""] | None,
    backend: str | None = None,
    attend: Callable = cached_attention,
) -> Generation:
    """One more token of each live sequence."""
    return _advance(params, model, state, temperature, 1, backend, attend)


@partial(jax.jit, static_argnames=STATIC, donate_argnames="state")
def decode_loop(
    params: dict,
    model: Decoder,
    state: Generation,
    temperature: Float[Array, ""] | None,
    max_steps: Int[Array, ""],
    backend: str | None = None,
    attend: Callable = cached_attention,
) -> Generation:
    """`decode_step` until every sequence has ended, or `max_steps` times."""

    def goes_on(carry) -> Bool[Array, ""]:
        step, state = carry
        return (step < max_steps) & state.live.any()

    def advance(carry):
        step, state = carry
        return step + 1, _advance(params, model, state, temperature, 1, backend, attend)

    return jax.lax.while_loop(goes_on, advance, (jnp.int32(0), state))[1]


def _advance(params, model, state, temperature, max_query_len, backend, attend) -> Generation:
    """Feeds the tokens that are not cached yet, and appends the next token of each sequence."""
    state, batch = _grow(state, max_query_len)
    tokens = _packed(state.tokens, batch)
    hidden, caches = forward_paged(params, model, tokens, state.caches, batch, backend, attend)
    logits = model.logits(params, hidden[batch.query_start_loc[1:] - 1])
    chosen = _chosen(logits, state, temperature)
    return _append(replace(state, caches=caches), chosen, model.stop_tokens)


def _chosen(logits, state, temperature):
    if temperature is None:
        return greedy_rows(logits)
    sample, each = jnp.int32(0), jax.vmap(pick, in_axes=(0, 0, None, 0, None))
    return each(logits, state.seeds, sample, state.lengths, temperature)


def _grow(state, max_query_len) -> tuple[Generation, BatchMetadata]:
    """Takes blocks for tokens that are not cached yet; a sequence that gets none ends here."""
    new = jnp.where(state.live, state.lengths - state.pool.seq_lens, 0)
    sizes = {"num_tokens": len(new) * max_query_len, "max_query_len": max_query_len}
    pool, batch, growth = next_batch(state.pool, new, **sizes)
    live, starved = state.live & growth.ok, state.starved | ~growth.ok
    return replace(state, pool=pool, live=live, starved=starved), batch


def _packed(tokens, batch):
    """The new tokens of all sequences, one sequence after the other."""
    seqs = sequence_ids(batch.query_start_loc, batch.num_tokens)
    return tokens[seqs, batch.positions]  # anything for padding, and for who got no blocks


def _append(state, chosen, stop_tokens) -> Generation:
    """Writes the chosen tokens behind live sequences; ends those that stop or are full."""
    rows, max_len = jnp.arange(len(chosen)), state.tokens.shape[1]
    at = jnp.where(state.live, state.lengths, max_len)
    tokens = state.tokens.at[rows, at].set(chosen, mode="drop")
    lengths = state.lengths + state.live
    stopped = jnp.isin(chosen, jnp.array(stop_tokens, jnp.int32))
    live = state.live & ~stopped & (lengths < state.ends)
    return replace(state, tokens=tokens, lengths=lengths, live=live)
