"""Tensor parallel: the tokens of one device, on two and on four."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pagedattn_serving.engine.generation import decode_loop, prefill, start
from pagedattn_serving.families.deepseek import DeepseekV3
from pagedattn_serving.families.forward import Operands, cached_attention
from pagedattn_serving.families.fused import fused, fused_by_device
from pagedattn_serving.families.olmo import Olmo2
from pagedattn_serving.families.pieces import GATE_UP, QUERY_KEY_VALUE, linears
from pagedattn_serving.families.qwen import Qwen2, Qwen3
from pagedattn_serving.parallel import tensor
from pagedattn_serving.parallel.all_reduce import Summed
from some_devices import mesh_over
from tiny import TINY, tiny_params, tiny_requests

from pagedattn import AttentionSpec, InvalidInputError, UnsupportedError, init_kv_cache, make_batch
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

PROMPTS = [list(request.prompt) for request in tiny_requests((5, 9, 3))]
NEW, SIZES = 12, {"max_new_tokens": 12, "num_blocks": 30, "block_size": 4}


def mesh_of(num_devices):
    return mesh_over(num_devices, tensor.AXIS)


def plain():
    return TINY, tiny_params()


def with_biases():
    """A model whose queries, keys and values have biases, and its parameters."""
    sizes = {"query_bias": 32, "key_bias": 16, "value_bias": 16}
    bias = {name: jnp.linspace(-1, 1, size) for name, size in sizes.items()}
    layers = [layer | bias for layer in tiny_params()["layers"]]
    model = Qwen2(**vars(TINY), layer_types=("full_attention",) * 2)
    return model, tiny_params() | {"layers": layers}


def on_one_device(model, params):
    state = start(params, model, PROMPTS, [0, 0, 0], **SIZES)
    state = prefill(params, model, state, 0.0, 9)
    state = decode_loop(params, model, state, 0.0, NEW)
    rows = zip(state.tokens.tolist(), state.lengths.tolist(), PROMPTS, strict=True)
    return [row[len(prompt) : length] for row, length, prompt in rows]


@pytest.mark.parametrize("num_devices", [1, 2, 4], ids=["one", "KV heads for all", "repeated"])
def test_tokens_are_those_of_one_device(num_devices):
    got = tensor.generate(mesh_of(num_devices), TINY, tiny_params(), PROMPTS, **SIZES)
    assert got == on_one_device(TINY, tiny_params())


def test_a_device_has_a_share_of_weights_and_caches_which_stay_in_place():
    mesh = mesh_of(4)
    model, params = tensor.spread(mesh, TINY, tiny_params())
    state = tensor.start_over(mesh, params, model, PROMPTS, [0, 0, 0], **SIZES)
    layer = params["layers"][0]
    shares = {name: layer[name].addressable_shards[0].data.shape for name in layer}
    assert shares["query_key_value"] == (1, 3 * 8, 24)  # of 4 KV heads, repeated from 2
    assert shares["gate_up"] == (1, 2 * 10, 24)
    assert shares["output"] == (24, 8)
    assert shares["down"] == (24, 10)
    assert params["embedding"].is_fully_replicated  # of 31 tokens
    before = pointers(state.caches)
    assert state.caches[0].key.addressable_shards[0].data.shape == (30, 4, 1, 8)
    state = prefill(params, model, state, 0.0, 9, attend=tensor.OverHeads(mesh))
    assert pointers(state.caches) == before
    state = decode_loop(params, model, state, 0.0, 3, attend=tensor.OverHeads(mesh))
    assert pointers(state.caches) == before


def test_sinks_go_with_their_heads():
    mesh = mesh_of(2)
    rows = jax.random.normal(jax.random.key(0), (3, 5, 4, 8))
    query, key, value = rows[0], rows[1, :, :2], rows[2, :, :2]
    batch = make_batch([5], [0], [[1, 0]], block_size=4)
    cache, sinks = init_kv_cache(2, 4, 2, 8, rows.dtype), np.float32([3, -1, 0, 2])
    arguments = Operands(query, key, value, sinks), cache, batch, AttentionSpec()
    got, want = (
        jax.jit(tensor.OverHeads(mesh), static_argnums=3)(*arguments),
        cached_attention(*arguments),
    )
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[1].key, want[1].key)


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("query_len", [1, 200])
def test_heads_of_128_by_the_backend_of_choice(num_devices, query_len):
    """Sizes for which each device has kernels of its own; of decodes as many as take a GPU."""
    num_seqs = 80 if query_len == 1 else 2
    seq_lens = [2100 if query_len == 1 and s == 0 else 200 for s in range(num_seqs)]
    problem = random_problem(
        [query_len] * num_seqs,
        seq_lens,
        AttentionSpec(),
        num_heads=8,
        num_kv_heads=4,
        head_dim=128,
        block_size=16,
        dtype=ml_dtypes.bfloat16,
    )
    cache, batch = cache_of(problem), batch_of(problem)
    rows = jnp.zeros((len(problem.query), 4, 128), cache.dtype)
    nowhere = replace(batch, slot_mapping=jnp.full(len(rows), -1))
    operands = Operands(jnp.asarray(problem.query), rows, rows, None)
    attend = jax.jit(tensor.OverHeads(mesh_of(num_devices)), static_argnums=3)
    out, _ = attend(operands, cache, nowhere, AttentionSpec())
    assert_attention_close(out, None, problem)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_what_is_fused_for_one_device_is_spread_like_the_rest(num_devices):
    """As the checkpoints of some families are: it lay everywhere, with too few KV heads."""
    model, params = with_biases()
    mesh = mesh_of(num_devices)
    (_, want), (_, got) = (tensor.spread(mesh, model, p) for p in (params, fused(params)))
    assert jax.tree.map(lambda x: x.sharding, got) == jax.tree.map(lambda x: x.sharding, want)
    weights = (without_memories(params) for params in (got, want))
    jax.tree.map(np.testing.assert_array_equal, *weights)


def without_memories(params):
    """The parameters without those by which two GPUs add, which each `spread` makes anew."""
    layers = [
        {name: x.weight if isinstance(x, Summed) else x for name, x in layer.items()}
        for layer in params["layers"]
    ]
    return params | {"layers": layers}


@pytest.mark.parametrize("case", [plain, with_biases])
def test_devices_add_up_twice_a_layer_and_gather_nothing(case):
    mesh = mesh_of(4)
    model, params = tensor.spread(mesh, *case())
    state = tensor.start_over(mesh, params, model, PROMPTS, [0, 0, 0], **SIZES)
    attend = tensor.OverHeads(mesh)
    program = decode_loop.lower(params, model, state, 0.0, 3, attend=attend).compile().as_text()
    kinds = r" (all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)\("
    crossing = re.findall(kinds, program)
    assert crossing == ["all-reduce"] * 2 * TINY.num_hidden_layers
    assert "rhs_contracting_dims={0}" not in program  # of a copy of a weight, transposed


def pointers(tree):
    leaves = jax.tree.leaves(tree)
    return [s.data.unsafe_buffer_pointer() for leaf in leaves for s in leaf.addressable_shards]


@pytest.mark.parametrize(
    ("num_devices", "heads", "head_dim", "inner"),
    [(1, (4, 2, 2), 8, 5), (2, (4, 2, 2), 8, 6), (3, (6, 3, 3), 4, 7), (4, (8, 4, 4), 2, 12)],
)
def test_fused_weights_give_the_outputs_of_each(num_devices, heads, head_dim, inner):
    """Also where `head_dim` does not divide by the devices, as long as the heads do."""
    numbers, x = np.random.default_rng(0), np.float32([[1, 2, 3], [-4, 0, 5]])
    rows = dict(zip(QUERY_KEY_VALUE, head_dim * np.array(heads), strict=True))
    rows |= dict.fromkeys(GATE_UP, inner)
    layer = {n: numbers.integers(-9, 9, (size, 3)).astype(np.float32) for n, size in rows.items()}
    layer |= {f"{n}_bias": weight[:, 0] + 1 for n, weight in layer.items()}
    (here,) = fused({"layers": [layer]})["layers"]
    (spread,) = fused_by_device(num_devices, {"layers": [layer]})["layers"]
    assert ("gate_up" in spread) == (inner % num_devices == 0)
    for names, sizes in ((QUERY_KEY_VALUE, heads), (GATE_UP, (1, 1))):
        want = linears(layer, names, x, sizes)
        jax.tree.map(np.testing.assert_array_equal, linears(here, names, x, sizes), want)
        jax.tree.map(np.testing.assert_array_equal, linears(spread, names, x, sizes), want)


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        (Qwen2, {"query_bias": 32, "key_bias": 16, "value_bias": 16}),
        (Qwen3, {"query_norm": 8, "key_norm": 8}),
        (Olmo2, {"query_norm": 32, "key_norm": 16}),
    ],
)
def test_repeated_heads_are_the_same(kind, others):
    """Whatever a family has for its keys and values: biases, norms of a head or of all heads."""
    model = kind(**vars(TINY), layer_types=("full_attention",) * 2)
    numbers, positions = np.random.default_rng(0), np.arange(5)
    shapes = {"query": (32, 24), "key": (16, 24), "value": (16, 24)} | others
    layer = {name: numbers.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    hidden = jnp.asarray(numbers.normal(size=(5, 24)), jnp.float32)
    want = model.heads(0, layer, hidden, positions)
    wider, params = tensor.with_kv_heads_for(4, model, {"layers": [layer]})
    got = wider.heads(0, params["layers"][0], hidden, positions)
    assert wider.num_key_value_heads == 4
    for ours, theirs, repeats in zip(got, want, (1, 2, 2), strict=True):
        np.testing.assert_allclose(ours, np.repeat(theirs, repeats, axis=1), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_dealt_out_is_refused():
    for num_devices, kv_heads in ((3, 2), (4, 3)):
        model = replace(TINY, num_key_value_heads=kv_heads)
        with pytest.raises(InvalidInputError, match=f"{num_devices} devices"):
            tensor.with_kv_heads_for(num_devices, model, {"layers": []})
    sizes = dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim"), 8)
    experts = {"moe_intermediate_size": 8, "n_routed_experts": 8, "num_experts_per_tok": 2}
    latent = DeepseekV3(**vars(TINY), **sizes, **experts, v_head_dim=8, q_lora_rank=None)
    with pytest.raises(UnsupportedError, match="latent cache"):
        tensor.with_kv_heads_for(2, latent, {"layers": []})
    spec = AttentionSpec(alibi_slopes=(0.5,) * 4)
    with pytest.raises(UnsupportedError, match="alibi_slopes"):
        tensor.OverHeads(mesh_of(1))(*[None] * 3, spec)
