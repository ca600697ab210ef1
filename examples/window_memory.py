"""Layers with a sliding window give memory back: one program, a pool for each kind of layer.

    python examples/window_memory.py

A small random model, in which every other layer has a window, decodes far past that window in one
`lax.scan`. After each step `release_behind` gives back what lies behind the window, so the pool of
the layers that have one stays small. A run that keeps everything must choose the same tokens.
"""

import sys
from functools import partial

import jax
import jax.numpy as jnp
from pagedattn_serving.families.mistral import Mistral
from pagedattn_serving.training.initial import large_params

import pagedattn as pa
from pagedattn.extend import cdiv

SIZES = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
WINDOW = {"sliding_window": 24, "layer_types": ("sliding_attention", "full_attention") * 2}
MODEL = Mistral(**SIZES, **HEADS, **WINDOW, max_position_embeddings=8192)
WINDOWS = MODEL.windows  # of each layer
GROUPS = list(dict.fromkeys(WINDOWS))  # a pool for each of these windows, None being no window
NUM_SEQS, BLOCK_SIZE = 4, 8


def start(longest: int, gives_back: bool) -> tuple[list[pa.BlockPool], list[pa.KVCache]]:
    """Pools in which every sequence can grow to the longest, and a cache for each layer."""
    most = cdiv(longest, BLOCK_SIZE)
    shown = {w: cdiv(w, BLOCK_SIZE) + 1 if w and gives_back else most for w in GROUPS}
    pools = [
        pa.init_block_pool(NUM_SEQS * shown[w], BLOCK_SIZE, max_seqs=NUM_SEQS, max_blocks=most)
        for w in GROUPS
    ]
    return pools, [MODEL.init_cache(NUM_SEQS * shown[w], BLOCK_SIZE, jnp.float32) for w in WINDOWS]


def step(params, gives_back: bool, carry, key):
    """A token more of each sequence; the blocks that each pool owns before it gives some back."""
    (pools, caches, tokens), new = carry, jnp.ones(NUM_SEQS, jnp.int32)
    pools, batches, growths = pa.next_batches(pools, new, num_tokens=NUM_SEQS, max_query_len=1)
    hidden, written = MODEL.embed(params, tokens), []
    for index, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        batch, spec = batches[GROUPS.index(WINDOWS[index])], MODEL.attention_spec(index)
        query, *rows = MODEL.heads(index, layer, hidden, batch.positions)
        written.append(pa.write_kv(cache, rows[0], rows[1], batch.slot_mapping))
        out = pa.paged_attention(query, written[-1], batch, spec)
        hidden = MODEL.rest(layer, hidden, out.reshape(NUM_SEQS, -1))
    owned = jnp.stack([pool.num_blocks - pool.num_free for pool in pools])
    if gives_back:  # all layers have attended: now it can be done
        pairs = zip(pools, GROUPS, strict=True)
        pools = [pa.release_behind(pool, w)[0] if w else pool for pool, w in pairs]
    chosen = jax.random.categorical(key, MODEL.logits(params, hidden)).astype(jnp.int32)
    return (pools, written, chosen), (chosen, owned, growths[0].ok.all())


@partial(jax.jit, static_argnums=(0, 1))
def run(steps: int, gives_back: bool):
    """Tokens `[steps, sequences]`, the blocks that each pool owned, and whether they sufficed."""
    decode = partial(step, large_params(MODEL, jax.random.key(1)), gives_back)
    first = (*start(steps, gives_back), jnp.arange(NUM_SEQS, dtype=jnp.int32))
    return jax.lax.scan(decode, first, jax.random.split(jax.random.key(0), steps))[1]


def main(steps: int = 240) -> int:
    (tokens, all_owned, _), (same, owned, ok) = run(steps, False), run(steps, True)
    for window, kept, left in zip(GROUPS, all_owned.max(0), owned.max(0), strict=True):
        print(f"window {window}: at most {left} blocks owned, {kept} if all are kept")
    return 0 if (tokens == same).all() and ok.all() else 1


if __name__ == "__main__":
    sys.exit(main())
