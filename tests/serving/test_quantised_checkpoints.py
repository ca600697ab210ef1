"""Quantised checkpoints: transformers' readers of weights, and the checkpoints they stand for."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_serving.checkpoint.folder import load_checkpoint
from pagedattn_serving.checkpoint.quantised import dequantised, from_fp8, from_mxfp4
from pagedattn_serving.checkpoint.tensor_file import read_tensors
from pagedattn_serving.engine.preemption import Recompute
from test_families import (
    CONFIGS,
    EXPERTS,
    SIZES,
    Theirs,
    check,
    served,
    shared_prefix_requests,
    theirs,
)

from pagedattn import InvalidInputError

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")
safetensors = pytest.importorskip("safetensors.torch")
fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")

pytestmark = pytest.mark.usefixtures("exact_products")
WEIGHTS = "model.safetensors"
MOST = 448.0  # of float8_e4m3fn
BLOCK = (128, 128)  # of all that are published
LARGE = {"hidden_size": 160, "intermediate_size": 200}  # a block, and a part of one
SAME = MappingProxyType({})


def random_blocks(seed: int, out: int, inputs: int, scales=(100, 150)):
    rng = np.random.default_rng(seed)
    blocks = rng.integers(256, size=(3, out, inputs // 32, 16), dtype=np.uint8)
    return blocks, rng.integers(*scales, size=blocks.shape[:3], dtype=np.uint8)


def save(tensors: dict, directory: Path, **settings) -> None:
    """Replaces the tensors of a checkpoint, and what its config says of their quantisation."""
    arrays = {name: torch.as_tensor(tensor).contiguous() for name, tensor in tensors.items()}
    safetensors.save_file(arrays, directory / WEIGHTS)
    config = directory / "config.json"
    raw = json.loads(config.read_text()) | {"quantization_config": settings or None}
    config.write_text(json.dumps(raw))


def tiles(shape, block) -> tuple[int, ...]:
    return (*shape[:-2], *(-(-n // size) for n, size in zip(shape[-2:], block, strict=True)))


def padded(weight, block):
    """With zeros to whole blocks: transformers reads no others."""
    (out, inputs), (rows, columns) = weight.shape[-2:], block
    return torch.nn.functional.pad(weight.float(), (0, -inputs % columns, 0, -out % rows))


def quantise(weight, block, dtype=torch.float32):
    """As the published ones are: each block is divided by a scale that makes its largest 448."""
    whole, (*lead, rows, columns) = padded(weight, block), tiles(weight.shape, block)
    split = whole.reshape(*lead, rows, block[0], columns, block[1])
    scales = (split.abs().amax(dim=(-3, -1)) / MOST).clamp(min=1e-8).to(dtype)
    scaled = (split / scales.float()[..., None, :, None]).reshape(whole.shape)
    out, inputs = weight.shape[-2:]
    return scaled.clamp(-MOST, MOST).to(torch.float8_e4m3fn)[..., :out, :inputs], scales


def by_transformers(weight, scales, block, dtype=torch.float32):
    reader = fp8.Fp8Dequantize(None)
    whole = padded(weight, block).to(torch.float8_e4m3fn)
    (read,) = reader.convert({"w": [whole], "w_scale_inv": [scales]})["w"]
    out, inputs = weight.shape[-2:]
    return read[..., :out, :inputs].to(dtype)


def quantised_tensors(tensors: dict, block=BLOCK, dtype=torch.float32) -> tuple[dict, dict]:
    """The matrices of the layers in eight bits, and the plain checkpoint that they stand for."""
    packed, plain = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim > 1 and ("layers." in name or ".h." in name):
            packed[name], scales = quantise(tensor, block, dtype)
            packed[f"{name}_scale_inv"] = scales
            plain[name] = by_transformers(packed[name], scales.float(), block)
    assert packed.keys() != plain.keys()
    return packed, plain


def settings_of(block=BLOCK) -> dict:
    """What a published config says, from DeepSeek-V3 to Qwen 3."""
    how = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"}
    return how | {"weight_block_size": list(block)}


@pytest.mark.parametrize("scales", [(100, 150), (0, 250)])
def test_mxfp4_is_read_as_transformers_reads_it(scales):
    reader = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    blocks, powers = random_blocks(0, 6, 64, scales)
    expected = reader(torch.tensor(blocks), torch.tensor(powers), dtype=torch.float32).numpy()
    ours = from_mxfp4(blocks, powers)
    assert ours.dtype == jnp.bfloat16
    assert ours.shape == (3, 64, 6)
    np.testing.assert_array_equal(np.asarray(ours, np.float32), expected)


def test_a_quantised_gpt_oss_is_the_one_that_its_blocks_stand_for(tmp_path):
    sizes = SIZES | EXPERTS | {"hidden_size": 64, "intermediate_size": 32, "num_local_experts": 3}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes))
    model.save_pretrained(tmp_path)
    tensors, packed = read_tensors(tmp_path / WEIGHTS), {}
    for seed, name in enumerate(sorted(n for n in tensors if n.endswith("_proj"))):
        _, inputs, out = tensors[name].shape
        if "experts" in name:
            packed[f"{name}_blocks"], packed[f"{name}_scales"] = random_blocks(seed, out, inputs)
    assert len(packed) == 8  # two layers, two weights, blocks and scales
    kept = {n: t for n, t in tensors.items() if f"{n}_blocks" not in packed}
    whole = dict(dequantised(kept | packed, {}))
    assert whole.keys() == tensors.keys()
    save({n: t.astype(np.float32) for n, t in whole.items()}, tmp_path)
    model, params = load_checkpoint(tmp_path)
    save(kept | packed, tmp_path, quant_method="mxfp4")
    again, same = load_checkpoint(tmp_path)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, same, params)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 11), st.integers(1, 11)),
    block=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_fp8_is_read_as_transformers_reads_it(shape, block, dtype, seed):
    """Any bits, those that are no number included."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    scales = torch.rand(tiles(shape, block), generator=generator).to(dtype)
    expected = by_transformers(bits.view(torch.float8_e4m3fn), scales.float(), block).numpy()
    weight, own = bits.numpy().view(jnp.float8_e4m3fn), scales.float().numpy()
    own = own.astype(jnp.bfloat16) if dtype == torch.bfloat16 else own  # exactly
    np.testing.assert_array_equal(from_fp8(weight, own, block), expected)
    np.testing.assert_array_equal(from_fp8(weight[0], own[0], block), expected[0])


def test_the_largest_checkpoints_have_a_part_of_a_block(tmp_path):
    """DeepSeek-V3's `kv_a_proj_with_mqa`, of 576 rows: 4 blocks and a half."""
    weight = torch.randn(576, 256, generator=torch.Generator().manual_seed(0))
    packed, scales = quantise(weight, BLOCK)
    assert scales.shape == (5, 2)
    read = from_fp8(packed.view(torch.uint8).numpy().view(jnp.float8_e4m3fn), scales.numpy(), BLOCK)
    np.testing.assert_allclose(read, weight.numpy(), rtol=0.07, atol=0.01)


def saved(name: str, directory: Path, sizes: Mapping = SAME, **how) -> dict:
    """A family's model in eight bits, in `packed`, and the plain one it stands for, in `plain`."""
    judge = theirs(name, **sizes)
    for folder in ("packed", "plain"):
        judge.model.save_pretrained(directory / folder)
    tensors = safetensors.load_file(directory / "plain" / WEIGHTS)
    packed, plain = quantised_tensors(tensors, **how)
    save(packed, directory / "packed", **settings_of(how.get("block", BLOCK)))
    save(plain, directory / "plain")
    return packed


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_in_fp8_is_the_plain_checkpoint_it_stands_for(tmp_path, name):
    dtype = torch.bfloat16 if "qwen" in name else torch.float32
    saved(name, tmp_path, block=(12, 10), dtype=dtype)
    for rounded in (jnp.float32, jnp.bfloat16):
        (model, params), (plain, expected) = (
            load_checkpoint(tmp_path / folder, rounded) for folder in ("packed", "plain")
        )
        assert model == plain
        jax.tree.map(np.testing.assert_array_equal, params, expected)


def test_a_model_in_fp8_answers_as_transformers_does_with_the_plain_one(tmp_path):
    """In blocks as published, with parts of blocks at the edges."""
    packed = saved("deepseek v3", tmp_path, LARGE)
    assert len({t.shape for n, t in packed.items() if n.endswith("_scale_inv")}) > 2
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", attn_implementation="eager", dtype=torch.float32
    )
    judge, requests = Theirs(plain), shared_prefix_requests()
    completions, scores = served(tmp_path / "packed", requests, Recompute)
    assert completions == {request.id: judge.greedy(request) for request in requests}
    check(judge, requests, completions, scores)


WRONG = {
    "no scales": lambda scales: None,
    "another grid": lambda scales: scales[:, :1],
    "integers": lambda scales: scales.to(torch.int32),
    "not finite": lambda scales: scales * torch.nan,
}


@pytest.fixture(scope="module")
def eight_bits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight_bits")
    return saved("qwen3", folder, LARGE), folder / "packed"


@pytest.mark.parametrize("wrong", WRONG)
def test_scales_that_do_not_fit_are_refused_by_their_name(eight_bits, wrong):
    packed, folder = eight_bits
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    assert packed[name].shape == (2, 2)
    tensors = packed | {name: WRONG[wrong](packed[name])}
    save({n: t for n, t in tensors.items() if t is not None}, folder, **settings_of())
    with pytest.raises(InvalidInputError, match=name):
        load_checkpoint(folder)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"model.norm.weight_scale_inv": torch.ones(1)}, {}, "model.norm.weight in float8_e4m3fn"),
        ({"model.other.weight_scale_inv": torch.ones(1)}, {}, "a weight beside model.other"),
        ({}, {"weight_block_size": None}, "weight_block_size"),
        ({}, {"weight_block_size": [128, 0]}, "weight_block_size"),
        ({}, {"weight_block_size": [64, 64]}, "each block of .64, 64."),
        ({}, {"quant_method": None}, "weight_block_size"),
        ({}, {"quant_method": "fbgemm_fp8"}, "quantized"),
        ({"model.norm.weight": torch.ones(8, dtype=torch.complex64)}, {}, "norm.weight .* C64"),
    ],
)
def test_what_is_not_fp8_in_blocks_is_refused(eight_bits, change, settings, message):
    packed, folder = eight_bits
    how = settings_of() | settings if settings != {"quant_method": None} else {}
    save(packed | change, folder, **how)
    with pytest.raises(InvalidInputError, match=message):
        load_checkpoint(folder)


def test_mxfp4_without_its_scales_is_refused(tmp_path):
    blocks, _ = random_blocks(0, 6, 64)
    with pytest.raises(InvalidInputError, match="gate_up_proj_scales beside gate_up_proj"):
        dict(dequantised({"gate_up_proj_blocks": blocks}, {}))
