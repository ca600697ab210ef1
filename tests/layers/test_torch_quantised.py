"""Layers on quantised caches, as engines hold them."""

import contextlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import SPECS
from torch._subclasses import FakeTensorMode
from torch_layers import Step, layer_of, step_of

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    KVCache,
    PagedAttentionError,
    UnsupportedError,
)
from pagedattn._dispatch.call import call_of
from pagedattn._dispatch.registry import Framework, record
from pagedattn.testing import assert_attention_close, batch_of, random_problem
from pagedattn_torch import (
    AttentionMetadata,
    IpexAttnBackendImpl,
    PagedAttention,
    TorchSDPABackend,
    TorchSDPABackendImpl,
    XFormersImpl,
)
from pagedattn_torch.layers.quantised import DTYPES

KINDS = {"fp8": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8"}
SCALES = {"k_scale": 0.03, "v_scale": 0.05}


def held(values, scale, name):
    """Values rounded to what a cache holds, as floats."""
    return written(values, scale, name).astype(np.float32) * np.float32(scale)


def written(values, scale, name):
    wide = values.astype(np.float32) / np.float32(scale)
    bound = {"fp8": 448, "fp8_e5m2": 57344, "int8": 127}[name]
    wide = wide.clip(-bound, bound)
    return (np.rint(wide) if name == "int8" else wide).astype(KINDS[name])


def quantised_step(name, lens=([6, 7, 1, 4], [6, 19, 22, 5]), bytes_=False):
    """A step over a quantised cache, whose new keys are floats; and the problem that it is."""
    problem = random_problem(*lens, SPECS["all"], poison=None)
    step = step_of(problem)
    planes = [
        written(np.nan_to_num(plane), scale, name)
        for plane, scale in zip(step.kv_cache.cpu().numpy(), SCALES.values(), strict=True)
    ]
    cache = torch.from_numpy(np.stack(planes).view(np.uint8))
    cache = cache if bytes_ else cache.view(DTYPES[name])
    old = problem.replace(
        key_cache=held(problem.key_cache, SCALES["k_scale"], name),
        value_cache=held(problem.value_cache, SCALES["v_scale"], name),
    )
    return step._replace(kv_cache=cache.to(step.query.device)), old


@pytest.mark.parametrize("bytes_", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_writes_and_reads(name, bytes_):
    """Prompts, chunks and decodes see their keys as the cache holds them."""
    step, problem = quantised_step(name, bytes_=bytes_)
    layer = layer_of(problem, kv_cache_dtype=name)
    got = layer.forward(*step, **SCALES)
    assert_attention_close(got, None, problem)
    want = written(step.key.cpu().numpy(), SCALES["k_scale"], name)
    slots = batch_of(problem).slot_mapping
    flat = step.kv_cache[0].flatten(0, 1).view(torch.uint8)[torch.tensor(slots.tolist())]
    assert (flat.cpu().numpy() == want.view(np.uint8)).all()


@pytest.mark.parametrize("how", ["numbers", "tensors", "the layer's"])
def test_scales_of_every_form(how):
    class Layer:
        _k_scale, _v_scale = (torch.tensor(scale) for scale in SCALES.values())

    step, problem = quantised_step("fp8")
    layer = layer_of(problem, kv_cache_dtype="fp8")
    layer.prepare(*step)
    if how == "the layer's":
        got = layer.forward(Layer(), *step)
    else:
        make = float if how == "numbers" else torch.tensor
        got = layer.forward(*step, **{name: make(scale) for name, scale in SCALES.items()})
    assert_attention_close(got, None, problem)


def test_chunks_are_one_shot():
    """A prompt at once, and token by token: the same but for rounding."""
    step, problem = quantised_step("int8", ([16], [16]))
    layer = layer_of(problem, kv_cache_dtype="int8")
    whole = layer.forward(*step, **SCALES)
    cache = torch.zeros_like(step.kv_cache)
    for i in range(16):
        rows = problem.block_tables
        meta = AttentionMetadata.from_lists([1], [i], rows, block_size=problem.block_size)
        one = Step(*(x[i : i + 1] for x in step[:3]), cache, meta)
        torch.testing.assert_close(layer.forward(*one, **SCALES)[0], whole[i], rtol=1e-5, atol=1e-5)


def test_blocks_are_copied():
    cache = torch.arange(8, dtype=torch.uint8).reshape(2, 4, 1)
    TorchSDPABackend.copy_blocks([cache], {0: [3]})
    assert cache[:, 3].flatten().tolist() == [0, 4]
    cache = cache.view(torch.float8_e5m2).reshape(2, 4, 1, 1, 1)
    TorchSDPABackend.swap_blocks(cache, cache.clone(), {0: 1})


def test_refusals_leave_the_cache():
    step, problem = quantised_step("fp8")
    before = step.kv_cache.view(torch.uint8).clone()
    with pytest.raises(UnsupportedError, match="ipex"):  # before any step
        IpexAttnBackendImpl(4, 16, num_kv_heads=2, kv_cache_dtype="fp8")
    layer = layer_of(problem, kv_cache_dtype="fp8")
    for scales in ({"k_scale": 0.0}, {"k_scale": "1"}, {"v_scale": torch.ones(3)}):
        with pytest.raises(InvalidInputError, match="scale"):
            layer.forward(*step, **scales)
    with pytest.raises(InvalidInputError, match="kv_cache must be"):
        layer.forward(*step._replace(kv_cache=step.kv_cache.float()))
    assert torch.equal(step.kv_cache.view(torch.uint8), before)
    with pytest.raises(UnsupportedError, match="k_scale must be 1"):
        layer_of(random_problem([1], [1], AttentionSpec())).forward(*step, **SCALES)


LAYERS = (TorchSDPABackendImpl, XFormersImpl, IpexAttnBackendImpl)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cls", LAYERS)
def test_a_layer_that_is_made_is_not_refused_for_its_cache(cls, name):
    """The constructor refuses what every forward would."""
    problem = random_problem([3, 1], [3, 9], AttentionSpec(), head_dim=16)
    query, _, _, kv_cache, meta = step_of(problem)
    cache = KVCache(*kv_cache.to(DTYPES[name]))
    call = call_of(query, cache, meta.to_batch(cache.block_size), problem.spec)
    refused = "cache_dtype" in " ".join(record(cls.backend, Framework.TORCH).why_not(call))
    assert refused is (cls is IpexAttnBackendImpl)
    if refused:
        with pytest.raises(UnsupportedError, match=r"kv_cache_dtype.*ipex"):
            cls(4, 16, num_kv_heads=2, kv_cache_dtype=name)
    else:
        assert cls(4, 16, num_kv_heads=2, kv_cache_dtype=name).cache_dtype is DTYPES[name]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("attempt", ["export", "fake"])
def test_an_attempt_without_memory_leaves_no_scale_behind(attempt):
    """torch.export and fake tensors meet a layer's scale first; then real ones come."""
    scale = 0.61 if attempt == "export" else 0.67  # no other test has made them

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = TorchSDPABackendImpl(4, 16, num_kv_heads=2, kv_cache_dtype="fp8")
            self.register_buffer("cache", torch.zeros(2, 4, 4, 2, 16, dtype=torch.uint8))

        def forward(self, query, key, value):
            meta = AttentionMetadata.from_lists([3], [0], [[0]], block_size=4)
            return self.layer.forward(query, key, value, self.cache, meta, scale, scale)

    model, rows = Model(), (torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16))
    if attempt == "export":
        with pytest.raises(PagedAttentionError):
            torch.export.export(model, rows)
    else:
        real = rows[1], model.cache[0], torch.arange(3)
        with contextlib.suppress(PagedAttentionError), FakeTensorMode() as mode:
            row, plane, slots = map(mode.from_tensor, real)
            planes = plane, plane.clone()
            PagedAttention.write_to_paged_cache(row, row, *planes, slots, "fp8", scale, scale)
    assert model(*rows).shape == (3, 4, 16)


@pytest.mark.usefixtures("on_cpu")
def test_a_gradient_of_a_scale_is_refused_in_every_layer():
    layer = TorchSDPABackendImpl(4, 16, num_kv_heads=2, kv_cache_dtype="int8")
    cache = torch.zeros(2, 1, 4, 2, 16, dtype=torch.int8)
    rows = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    meta = AttentionMetadata.from_lists([3], [0], [[0]], block_size=4)
    scale = torch.tensor(0.5, requires_grad=True)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="gradients"):
            layer.forward(*rows, cache, meta, scale, 0.5)
        layer.forward(*rows, cache, meta, 0.5, 0.5)  # and leaves a prepared step
    with torch.no_grad():
        layer.forward(*rows, cache, meta, scale, 0.5)
