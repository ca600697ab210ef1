"""What a quantised cache costs a model, against the same model on a cache of bfloat16.

    python examples/quantised_cache.py

Held-out text goes through the model as in serving: what is written to the cache is rounded, but by
float32, which shows what bfloat16 costs by itself. Scales of heads are the largest numbers of other
text, over the largest that the dtype holds. The first run compiles for minutes.
"""

import jax
import jax.numpy as jnp
import numpy as np
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.families.forward import cached_attention, forward_paged
from pagedattn_serving.training.corpus import split_topics

from pagedattn import KVCache, init_kv_cache, make_batch

WINDOWS, LENGTH, BLOCK_SIZE = 8, 512, 16
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
BASE, EXACT = "bfloat16", "float32"
SCALED = [(dtype, scales) for scales in ("head", "token") for dtype in LARGEST]
KINDS = [(BASE, None), (EXACT, None), *SCALED, ("int4", "token")]


def main():
    """Of each kind: next tokens that agree, the rise of the loss, the bits of a number."""
    model, params = load_checkpoint(SHIPPED, jnp.dtype(BASE))
    tables = np.arange(WINDOWS * LENGTH // BLOCK_SIZE).reshape(WINDOWS, -1)
    batch = make_batch([LENGTH] * WINDOWS, [0] * WINDOWS, tables, block_size=BLOCK_SIZE)
    other, held_out = (text[: WINDOWS * LENGTH].astype(jnp.int32) for text in split_topics())
    size = tables.size, BLOCK_SIZE, model.num_key_value_heads, model.head_dim

    @jax.jit
    def run(tokens, caches):
        hidden, caches = forward_paged(params, model, tokens, caches, batch, attend=attend)
        return model.logits(params, hidden).astype(jnp.float32), caches

    plain = [init_kv_cache(*size, BASE)] * model.num_hidden_layers
    (_, calibrated), (base, _) = (run(text, plain) for text in (other, held_out))
    for dtype, scales in KINDS:
        caches = [new_cache(size, dtype, scales, cache) for cache in calibrated]
        logits, _ = run(held_out, caches)
        rise = loss_of(logits, held_out) - loss_of(base, held_out)
        agree = float((logits.argmax(1) == base.argmax(1)).mean())
        yield f"{dtype}, {scales}" if scales else dtype, (agree, rise, bits_of(caches[0]))


def attend(operands, cache, *rest):
    """In float32 if the cache is."""
    dtype = EXACT if cache.key.dtype == EXACT else BASE
    out, cache = cached_attention(jax.tree.map(lambda x: x.astype(dtype), operands), cache, *rest)
    return out.astype(BASE), cache


def new_cache(size: tuple, dtype: str, scales, calibrated: KVCache) -> KVCache:
    """An empty one; `calibrated` holds other text."""
    if scales != "head":
        return init_kv_cache(*size, dtype=dtype, scales=scales)
    key, value = (abs(x).max((0, 1, 3)).astype(EXACT) / LARGEST[dtype] for x in calibrated.planes)
    return init_kv_cache(*size, dtype=dtype, key_scale=key, value_scale=value)


def bits_of(cache: KVCache) -> float:
    """Of a number, with its share of the scales."""
    held = sum(array.nbytes for array in cache.by_slot.values())
    return 8 * held / (2 * cache.num_slots * cache.num_kv_heads * cache.head_dim)


def loss_of(logits: jax.Array, tokens: jax.Array) -> float:
    """The mean cross entropy of each text's next tokens."""
    logits, tokens = logits.reshape(WINDOWS, LENGTH, -1)[:, :-1], tokens.reshape(WINDOWS, -1)[:, 1:]
    return -float(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], 2).mean())


if __name__ == "__main__":
    print("cache, scales           bits   next tokens as by bfloat16's   loss", flush=True)
    for kind, (agree, loss, bits) in main():
        print(f"{kind:<22} {bits:>5.2f}   {agree:>28.2%}   {loss:>+6.4f}", flush=True)
