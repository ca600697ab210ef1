"""A backend of your own, held to the oracle. In it every token gathers the keys of its sequence.

`python examples/own_backend.py` does so. To have it found by name, register it in pyproject.toml:

    [project.entry-points."pagedattn.backends"]
    gathered = "your_package:BACKEND"
"""

# pyright: reportUnknownMemberType=false
import jax
import jax.numpy as jnp

from pagedattn import KVCache, attention_bias
from pagedattn.extend import Backend, Call, Sequences, positions, sequence_ids
from pagedattn.testing import check_backend

# A call that asks for another option is refused before any function here is called.
SUPPORTS = frozenset({"scale", "causal", "sliding_window", "alibi_slopes", "return_lse"})
MOST_KEYS = 1 << 14


def refusals(call: Call) -> list[str]:
    """Why it cannot run a call, judged by sizes alone: the values may not exist yet."""
    told = f"it gathers at most {MOST_KEYS} keys a token, max_blocks allows {call.capacity}"
    return [told] if call.capacity > MOST_KEYS else []


def run(call: Call, query: jax.Array, cache: KVCache[jax.Array], batch: Sequences[jax.Array]):
    seqs = sequence_ids(batch.query_start_loc, call.num_tokens)  # -1 for padding tokens
    queries = positions(batch.query_start_loc, batch.seq_lens, call.num_tokens)
    keys = jnp.arange(call.capacity)
    bias = attention_bias(queries[:, None], keys[None], call.spec)
    bias = bias.reshape(call.num_tokens, -1, call.capacity)  # one for all heads; ALiBi: one each
    present = (seqs >= 0)[:, None] & (keys < batch.seq_lens[seqs][:, None])
    seen = present[:, None] & (bias > -jnp.inf)
    tables = batch.block_tables[seqs]
    key, value = (gathered(call, plane, tables) for plane in cache.planes)
    # Values that no query may see can be NaN, and 0 * NaN is NaN: they become 0.
    value = jnp.where(seen.any(axis=1)[..., None, None], value, 0)
    logits = call.scale * jnp.einsum("thd,tshd->ths", query.astype(float), key, precision="highest")
    logits = jnp.where(seen, logits + bias, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=2)
    weights = jnp.exp(logits - jnp.where(jnp.isneginf(lse), 0, lse)[..., None])
    out = jnp.einsum("ths,tshd->thd", weights, value, precision="highest")
    return out.astype(query.dtype), lse


def gathered(call: Call, plane: jax.Array, tables: jax.Array) -> jax.Array:
    """Keys or values `[num_tokens, capacity, num_heads, head_dim]`; unused ids may be anything."""
    pages = plane.at[tables].get(mode="clip", wrap_negative_indices=False)
    pages = pages.reshape(call.num_tokens, call.capacity, call.num_kv_heads, call.head_dim)
    return jnp.repeat(pages.astype(float), call.group, axis=2)


BACKEND = Backend("gathered", SUPPORTS, run, refusals)

if __name__ == "__main__":
    check_backend(BACKEND)
