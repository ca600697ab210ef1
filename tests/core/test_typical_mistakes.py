"""What a newcomer gets wrong: each text names the argument, and says what to give instead."""

import dataclasses
import importlib
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import pagedattn as pa

CACHE = pa.init_kv_cache(8, 4, 2, 16, jnp.float32)
BATCH = pa.make_batch([2], [0], [[3]], block_size=4)
QUERY, KEY = jnp.ones((2, 8, 16)), jnp.ones((2, 2, 16))


def nnx():
    return pytest.importorskip("flax.nnx")


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
    "slot_mapping must have a slot for each of the 2 tokens of key, got 1": lambda: pa.write_kv(
        CACHE, KEY, KEY, [0]
    ),
    "value must be [num_tokens, num_kv_heads, value_dim] = [2, 2, 16]": lambda: pa.write_kv(
        CACHE, KEY, KEY[:1], [0, 1]
    ),
    "key must be [num_tokens, num_kv_heads, head_dim] = [num_tokens, 2, 16]": lambda: pa.write_kv(
        CACHE, KEY[:, :1], KEY, [0, 1]
    ),
    "got float32[2, 1, 2, 16]: key.reshape(-1, *key.shape[2:])": lambda: pa.write_kv(
        CACHE, KEY[:, None], KEY, [0, 1]
    ),
    "got float32[1, 2, 8, 16]: query.reshape(-1, *query.shape[2:])": lambda: pa.paged_attention(
        QUERY[None], CACHE, BATCH
    ),
    "got float32[1, 2, 2, 16]: key.reshape(-1, *key.shape[2:])": lambda: pa.ragged_attention(
        QUERY, KEY[None], KEY[None], [0, 2], [0, 2], max_query_len=2, max_key_len=2
    ),
    "got bool[2, 1, 4]: where True shows a key, jnp.where(bias, 0.0, -jnp.inf)": lambda: (
        pa.paged_attention(QUERY, CACHE, BATCH, bias=jnp.ones((2, 1, 4), bool))
    ),
    "cache must be a KVCache, got Cache, a variable that holds one: its .get_value() is": lambda: (
        pa.paged_attention(QUERY, nnx().Cache(CACHE), BATCH)
    ),
    "cache must be a KVCache, got Param, a variable that holds": lambda: pa.write_kv(
        nnx().Param(CACHE), KEY, KEY, [0, 1]
    ),
    "a cache's dtype must be floating of 16 bits or more": lambda: pa.init_kv_cache(
        8, 4, 2, 16, "bf16"
    ),
    "float8_e5m2, int8 or int4, got 'float8_e4m3'": lambda: pa.init_kv_cache(
        8, 4, 2, 16, "float8_e4m3"
    ),
    "summaries must be BlockSummaries, got KVCache": lambda: pa.score_blocks(QUERY, CACHE, BATCH),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_the_text_says_what_to_give(text):
    with pytest.raises(pa.InvalidInputError) as raised:
        MISTAKES[text]()
    assert text in str(raised.value)


MASK = jnp.ones((2, 1, 4), bool)
# Keywords of other libraries' functions, and what the text says.
KEYWORDS = {
    "mask": "bias",
    "attn_mask": "bias",
    "attn_bias": "bias",
    "scale": "AttentionSpec(scale=...)",
    "softmax_scale": "AttentionSpec(scale=...)",
    "sm_scale": "AttentionSpec(scale=...)",
    "scaling": "AttentionSpec(scale=...)",
    "causal": "AttentionSpec(causal=...)",
    "is_causal": "AttentionSpec(causal=...)",
    "sliding_window": "AttentionSpec(sliding_window=...)",
    "window_size": "AttentionSpec(sliding_window=...), left + 1",
    "window_left": "AttentionSpec(sliding_window=...), left + 1",
    "local_window_size": "AttentionSpec(sliding_window=...), left + 1",
    "logits_soft_cap": "AttentionSpec(logits_soft_cap=...)",
    "softcap": "AttentionSpec(logits_soft_cap=...)",
    "attn_logits_soft_cap": "AttentionSpec(logits_soft_cap=...)",
    "alibi_slopes": "AttentionSpec(alibi_slopes=...)",
    "s_aux": "sinks",
    "return_softmax_lse": "return_lse",
}


def entry_points():
    """Of JAX, and of torch where it is installed; none looks at its arrays first."""
    yield pa.paged_attention
    yield pa.ragged_attention
    if importlib.util.find_spec("torch"):
        torch_side = importlib.import_module("pagedattn_torch")
        yield torch_side.paged_attention
        yield torch_side.ragged_attention


@pytest.mark.parametrize("word", KEYWORDS)
def test_a_keyword_of_another_library_says_what_it_is_called_here(word):
    for attend in entry_points():
        with pytest.raises(pa.InvalidInputError, match=f"^{word} is no keyword") as raised:
            attend(QUERY, CACHE, BATCH, **{word: 1})
        assert KEYWORDS[word] in str(raised.value)
        with pytest.raises(TypeError, match="unexpected keyword argument 'of_nobody'"):
            attend(QUERY, CACHE, BATCH, of_nobody=1)


def test_the_bias_that_a_text_names_is_the_mask():
    cache = pa.write_kv(CACHE, KEY, KEY * 2, [12, 13])
    visible = jnp.array([[[True, True]], [[False, True]]])
    out = pa.paged_attention(QUERY, cache, BATCH, bias=jnp.where(visible, 0.0, -jnp.inf))
    assert out.shape == QUERY.shape


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("backend", ["xla", None])
def test_heads_over_an_explicit_mesh_lead_to_shard_map(wrap, backend):
    """`jax.make_mesh` makes explicit axes, over which JAX would shard every operation itself."""
    mesh = jax.make_mesh((1,), ("tensor",), axis_types=(AxisType.Explicit,))

    def over(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    def attend(query, cache, batch=BATCH, **options):
        return pa.paged_attention(query, cache, batch, backend=backend, **options)

    query, planes = over(QUERY, None, "tensor"), over(CACHE.key, None, None, "tensor")
    everywhere = over(QUERY), jax.tree.map(over, CACHE)
    lens = dataclasses.replace(BATCH, seq_lens=over(jnp.asarray(BATCH.seq_lens), "tensor"))
    bias = over(jnp.zeros((2, 4, 4)), None, "tensor")
    values = pa.KVCache(everywhere[1].key, planes)
    scaled = pa.init_kv_cache(*CACHE.key.shape, "int8", scales="head")
    scaled = dataclasses.replace(scaled, key_scale=over(jnp.ones(2), "tensor"))
    for arrays, options in (
        ((query, CACHE), {}),
        ((over(QUERY), pa.KVCache(planes, planes)), {}),
        ((over(QUERY), values), {}),
        ((over(QUERY), scaled), {}),
        (everywhere, {"batch": lens}),
        (everywhere, {"bias": bias}),
    ):
        with pytest.raises(pa.UnsupportedError, match=r"explicit.*jax\.shard_map.*parallel"):
            wrap(attend)(*arrays, **options)
    assert wrap(attend)(*everywhere).shape == QUERY.shape
