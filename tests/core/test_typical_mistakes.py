"""What a newcomer gets wrong: each text names the argument, and says what to give instead."""

import jax.numpy as jnp
import pytest

import pagedattn as pa

CACHE = pa.init_kv_cache(8, 4, 2, 16, jnp.float32)
BATCH = pa.make_batch([2], [0], [[3]], block_size=4)
QUERY, KEY = jnp.ones((2, 8, 16)), jnp.ones((2, 2, 16))

MISTAKES = {
    "cache must be a KVCache, got tuple; KVCache(key, value)": lambda: pa.paged_attention(
        QUERY, (CACHE.key, CACHE.value), BATCH
    ),
    "batch must be a BatchMetadata, got dict; make_batch": lambda: pa.paged_attention(
        QUERY, CACHE, {"block_tables": [[3]]}
    ),
    "spec must be an AttentionSpec, got float": lambda: pa.paged_attention(
        QUERY, CACHE, BATCH, 0.25
    ),
    "each row of block_tables must be integers": lambda: pa.make_batch([2], [0], [3], block_size=4),
    "slot_mapping must name slots from 0 to 31, or -1 for no write, got [32]": lambda: pa.write_kv(
        CACHE, KEY, KEY, [0, 32]
    ),
    "dst must name blocks from 0 to 7, or -1 for no copy, got [8]": lambda: pa.copy_blocks(
        CACHE, [0], [8]
    ),
    "a cache's dtype must be floating or int8, such as jnp.bfloat16": lambda: pa.init_kv_cache(
        8, 4, 2, 16, "bf16"
    ),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_the_text_says_what_to_give(text):
    with pytest.raises(pa.InvalidInputError) as raised:
        MISTAKES[text]()
    assert text in str(raised.value)
