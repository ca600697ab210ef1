"""Chosen experts alone, against all of them; quantised weights against transformers' reader."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving.checkpoint import load_checkpoint
from serving.families.experts import Routed, mixture, tiles_of
from serving.quantised import dequantised, from_mxfp4

pytestmark = pytest.mark.usefixtures("exact_products")
WEIGHTS = ("first", "second")


def expert(weights, x):
    return jnp.tanh(x @ weights["first"]) @ weights["second"]


def all_experts(layer, x, routed):
    """Every expert for every token, weighed by 0 where it was not chosen."""
    outputs = jax.vmap(expert, in_axes=(0, None))({name: layer[name] for name in WEIGHTS}, x)
    chosen = jax.nn.one_hot(routed.experts, len(outputs)) * routed.weights[..., None]
    return jnp.einsum("tke,eth->th", chosen, outputs)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_chosen_experts_give_what_all_of_them_give(num_tokens):
    rng = np.random.default_rng(0)
    layer = {name: rng.normal(size=(6, 12, 12)).astype(np.float32) for name in WEIGHTS}
    x = rng.normal(size=(num_tokens, 12)).astype(np.float32)
    weights = rng.normal(size=(num_tokens, 3)).astype(np.float32)
    compiled = jax.jit(mixture, static_argnames=("names", "expert"))
    for experts in (
        rng.permuted(np.tile(np.arange(6), (num_tokens, 1)), axis=1)[:, :3],
        np.tile([5, 0, 2], (num_tokens, 1)),  # the same for all: five tiles of one expert
    ):
        routed = Routed(jnp.array(experts), jnp.array(weights))
        ours = compiled(layer, x, routed, WEIGHTS, expert)
        np.testing.assert_allclose(ours, all_experts(layer, x, routed), rtol=1e-4, atol=1e-4)


def test_experts_that_nobody_chose_are_not_looked_at():
    layer = {name: jnp.ones((4, 2, 2)).at[3].set(jnp.nan) for name in WEIGHTS}
    routed = Routed(jnp.array([[0, 2], [2, 1]]), jnp.ones((2, 2)))
    assert jnp.isfinite(mixture(layer, jnp.ones((2, 2)), routed, WEIGHTS, expert)).all()


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=5, max_size=5))
def test_a_tile_has_tokens_of_one_expert_and_a_row_has_one_token(chosen):
    tiles = tiles_of(jnp.array(chosen), num_experts=5, rows=3)
    slots, owners = np.ravel(tiles.slots), np.asarray(tiles.experts)
    assert len(set(slots)) == 10
    assert (owners[slots // 3] == np.ravel(chosen)).all()
    assert set(slots // 3) == set(range(int(tiles.count)))


def random_blocks(seed: int, out: int, inputs: int, scales=(100, 150)):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(256, size=(3, out, inputs // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(*scales, size=blocks.shape[:3], dtype=np.uint8)


@pytest.mark.parametrize("scales", [(100, 150), (0, 250)])
def test_mxfp4_is_read_as_transformers_reads_it(scales):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks, powers = random_blocks(0, 6, 64, scales)
    expected = theirs(torch.tensor(blocks), torch.tensor(powers), dtype=torch.float32).numpy()
    ours = from_mxfp4(jnp.array(blocks), jnp.array(powers))
    assert ours.dtype == jnp.bfloat16
    assert ours.shape == (3, 64, 6)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), expected)


def test_a_quantised_gpt_oss_is_the_one_that_its_blocks_stand_for(tmp_path):
    transformers = pytest.importorskip("transformers", minversion="5.23")
    from safetensors.flax import load_file, save_file
    from test_families import EXPERTS, SIZES

    sizes = SIZES | EXPERTS | {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    theirs.save_pretrained(tmp_path)
    config, path = tmp_path / "config.json", tmp_path / "model.safetensors"
    tensors, packed = load_file(path), {}
    for seed, name in enumerate(sorted(n for n in tensors if n.endswith("_proj"))):
        _, inputs, out = tensors[name].shape
        if "experts" in name:
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = random_blocks(seed, out, inputs)
    assert len(packed) == 8  # two layers, two weights, blocks and scales
    whole = dequantised(tensors | packed)
    assert whole.keys() == tensors.keys()
    save_file({n: jnp.asarray(t) for n, t in whole.items()}, path)
    model, params = load_checkpoint(tmp_path)

    kept = {n: t for n, t in tensors.items() if f"{n}_blocks" not in packed}
    save_file({n: jnp.asarray(t) for n, t in (kept | packed).items()}, path)
    raw = json.loads(config.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    config.write_text(json.dumps(raw))
    again, same = load_checkpoint(tmp_path)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, same, params)
