"""What the first layer of a step leaves to the others: the same results, and no work done twice."""

import contextlib
import copy
import dataclasses
import pickle
from typing import Any

import jax
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch_layers import assert_same, normal

from pagedattn import KVCache, PagedAttentionError
from pagedattn._dispatch.registry import Framework, can_load
from pagedattn_torch import (
    AttentionImpl,
    TorchSDPABackendImpl,
    TorchSDPAMetadata,
    init_kv_cache,
    write_kv_,
)
from pagedattn_torch.layers import impl, step
from pagedattn_torch.layers.metadata.contents import watch

pytestmark = pytest.mark.usefixtures("on_cpu")
BLOCK_SIZE, NUM_BLOCKS, WIDTH = 4, 24, 6
ARRAYS = ("slot_mapping", "seq_lens_tensor", "block_tables", "query_start_loc")
# Query lengths, and the contexts of some steps whose arrays have the same shapes.
STEPS = {
    "decodes": ([1, 1, 1], [[0, 7, 20], [3, 16, 4], [23, 0, 11]]),
    "mixed": ([5, 2, 1], [[0, 7, 20], [3, 0, 4], [7, 9, 11]]),
    "prompts": ([5, 2, 3], [[0, 0, 0], [0, 0, 0], [4, 0, 0]]),
}


def quantised(planes, **scales) -> KVCache:
    """Planes as a cache in eight bits that comes with its scales."""
    cache = init_kv_cache(*planes.shape[1:], dtype="int8", **scales)
    rows = planes.float().flatten(1, 2)
    return write_kv_(cache, *rows, torch.arange(rows.shape[1]))


class NumbaImpl(AttentionImpl):
    """What it plans holds addresses of memory."""

    backend = "numba"


LAYERS = [
    TorchSDPABackendImpl(4, 8, num_kv_heads=2),
    TorchSDPABackendImpl(4, 8, num_kv_heads=2, sliding_window=3),
    TorchSDPABackendImpl(4, 8, num_kv_heads=2, alibi_slopes=[0.5, -0.2, 0.1, 1.0]),
    TorchSDPABackendImpl(2, 16, num_kv_heads=1),  # of the same packed shapes
    TorchSDPABackendImpl(4, 8, num_kv_heads=2, attn_type="encoder_only"),
    TorchSDPABackendImpl(4, 8, num_kv_heads=2, kv_cache_dtype="int8"),
    *[NumbaImpl(4, 8, num_kv_heads=2)] * can_load("numba", Framework.TORCH),
]
CACHES = {
    "plain": lambda cache: cache.clone(),
    "flat": lambda cache: cache.clone().flatten(2),
    "more blocks": lambda cache: torch.cat([cache, cache], 1),
    "heads before slots": lambda cache: cache.transpose(2, 3).contiguous().transpose(2, 3),
    "blocks of two": lambda cache: cache.clone().unflatten(2, (2, 2)).flatten(1, 2),
    "too few blocks": lambda cache: cache[:, :3].clone(),
    "per-head scales": lambda cache: quantised(cache, key_scale=0.02, value_scale=0.03),
    "per-token scales": lambda cache: quantised(cache, scales="token"),
}
# Ways to change a tensor, of which torch counts the first alone.
WRITES = {
    "torch": lambda tensor, values: tensor.copy_(values),
    "data": lambda tensor, values: tensor.data.copy_(values),
    "numpy": lambda tensor, values: np.copyto(tensor.numpy(), values.numpy()),
}


def steps_of(name: str, lists: bool) -> list[dict[str, Any]]:
    """The fields that an engine gives for each of some steps, with lengths in both forms or one."""
    query_lens, contexts = STEPS[name]
    return [fields_of(query_lens, lens, seed, lists) for seed, lens in enumerate(contexts)]


def fields_of(query_lens, context_lens, seed=0, lists=True) -> dict[str, Any]:
    lens = np.add(query_lens, context_lens)
    tables = np.random.default_rng(seed).permutation(NUM_BLOCKS)[: len(lens) * WIDTH]
    tables = tables.reshape(-1, WIDTH)
    positions = [(s, p) for s, n in enumerate(lens) for p in range(context_lens[s], n)]
    slots = [tables[s, p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in positions]
    prefills = sum(n > 1 for n in query_lens)
    return {
        "num_prefills": prefills,
        "num_prefill_tokens": sum(query_lens[:prefills]),
        "num_decode_tokens": sum(query_lens[prefills:]),
        "slot_mapping": torch.tensor(slots),
        "seq_lens_tensor": torch.tensor(lens, dtype=torch.int32),
        "block_tables": torch.tensor(tables, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *np.cumsum(query_lens)], dtype=torch.int32),
    } | ({"seq_lens": lens.tolist()} if lists else {})


def arrays_of(layer, num_tokens, dtype=torch.float32, seed=0):
    """Query, key, value, and a cache."""
    rows = (normal(seed + i, num_tokens, n, dtype=dtype) for i, n in enumerate((32, 16, 16)))
    shape = 2, NUM_BLOCKS, BLOCK_SIZE, layer.num_kv_heads, layer.head_size
    cache = normal(seed + 3, *shape, dtype=dtype)
    return *rows, cache if layer.cache_dtype is None else cache.mul(30).to(torch.int8)


class Held:
    """Metadata, and the objects that it was given: what programs do to both between layers."""

    def __init__(self, fields):
        self.fields = copy.deepcopy(fields)
        self.meta = TorchSDPAMetadata(**self.fields)

    def fresh(self):
        return TorchSDPAMetadata(**copy.deepcopy(self.fields))

    def write(self, names, new, how):
        for name in names:
            WRITES[how](self.fields[name], new[name])

    def assign(self, names, new):
        for name in names:
            self.fields[name] = new[name].clone()
            setattr(self.meta, name, self.fields[name])

    def change_list(self, new):
        """As engines do that advance a step by one token."""
        if "seq_lens" in self.fields:
            with contextlib.suppress(PagedAttentionError):  # the fields contradict each other now
                self.meta.seq_lens[:] = new["seq_lens_tensor"].tolist()
                self.fields["seq_lens"] = new["seq_lens_tensor"].tolist()

    def change_derived(self):
        with contextlib.suppress(PagedAttentionError):
            self.fields["seq_start_loc"] = self.meta.seq_start_loc.add_(1)


def change(draw, held, steps):
    new = draw(st.sampled_from(steps))
    names = draw(st.sampled_from([ARRAYS, ARRAYS, *((name,) for name in ARRAYS)]))
    what = draw(st.sampled_from(["write", "assign", "list", "derived"]))
    if what == "write":
        held.write(names, new, draw(st.sampled_from([*WRITES])))
    elif what == "assign":
        held.assign(names, new)
    elif what == "list":
        held.change_list(new)
    else:
        held.change_derived()


def outcome(layer, arrays, cache, make_meta):
    """What a forward returns and what the cache holds then, or the error."""
    *rows, kv_cache = arrays
    kv_cache = CACHES[cache](kv_cache)
    try:
        return layer.forward(*rows, kv_cache, make_meta()), kv_cache
    except PagedAttentionError as error:
        return type(error), str(error)


def assert_same_outcome(got, want):
    if isinstance(want[1], str):
        assert got == want
    else:
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            assert_same(one, other)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", STEPS)
@given(data=st.data())
def test_results_are_those_of_new_metadata(name, inference, data):
    """Whatever happens between layers: fields change, in place or not, or the layers differ."""
    draw = data.draw
    with torch.inference_mode(inference):
        steps = steps_of(name, lists=draw(st.booleans()))
        held = Held(steps[0])
        for _ in range(draw(st.integers(2, 5))):
            for _ in range(draw(st.integers(0, 3))):
                change(draw, held, steps)
            layer, cache = draw(st.sampled_from(LAYERS)), draw(st.sampled_from([*CACHES]))
            dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
            arrays = arrays_of(layer, sum(STEPS[name][0]), dtype, draw(st.integers(0, 3)))
            want = outcome(layer, arrays, cache, held.fresh)
            for _ in range(2):
                assert_same_outcome(outcome(layer, arrays, cache, lambda: held.meta), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STEPS)
def test_every_pair_of_layers_and_caches(name, dtype):
    held = Held(steps_of(name, lists=True)[0])
    for cache in (*CACHES, *CACHES):
        for layer in LAYERS:
            arrays = arrays_of(layer, sum(STEPS[name][0]), dtype)
            want = outcome(layer, arrays, cache, held.fresh)
            assert_same_outcome(outcome(layer, arrays, cache, lambda: held.meta), want)


@given(data=st.data())
def test_biases_changed_in_place_are_noticed(data):
    layer = LAYERS[0]
    fields = fields_of([1, 1, 1], [0, 7, 20])
    dtypes = st.sampled_from([torch.float32, torch.bfloat16])
    dtype = data.draw(dtypes)
    biases = [normal(i, 1, n, dtype=dtype) for i, n in enumerate(fields["seq_lens"])]
    held = Held(fields)
    held.meta.set_attn_bias(biases, "decoder")
    arrays = arrays_of(layer, 3)
    for seed in data.draw(st.lists(st.integers(0, 3), min_size=1)):
        number, way = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([*WRITES]))
        new = normal(seed, *biases[number].shape, dtype=dtype)
        bits = torch.int16 if dtype is torch.bfloat16 else torch.int32
        WRITES[way](biases[number].view(bits), new.view(bits))
        fresh = held.fresh()
        fresh.set_attn_bias(copy.deepcopy(biases), "decoder")
        want = outcome(layer, arrays, "plain", lambda fresh=fresh: fresh)
        assert_same_outcome(outcome(layer, arrays, "plain", lambda: held.meta), want)


@pytest.fixture
def plans(monkeypatch) -> list:
    """An entry for each time that a layer plans a step."""
    made = []
    own = impl.plan
    monkeypatch.setattr(impl, "plan", lambda *args: made.append(args) or own(*args))
    return made


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", STEPS)
def test_one_layer_plans_for_all(plans, name, layer, inference):
    with torch.inference_mode(inference):
        held = Held(steps_of(name, lists=False)[0])
        for seed in range(4):
            arrays = arrays_of(layer, sum(STEPS[name][0]), seed=seed)
            refused = isinstance(outcome(layer, arrays, "plain", lambda: held.meta)[1], str)
    assert len(plans) == (4 if refused else 1)


def wrong_calls(query, key, value, cache) -> dict[str, tuple[tuple, dict]]:
    """Calls of a layer that are refused, though their arrays resemble those of one that is not."""
    negated = torch._neg_view(query)
    apart = torch.zeros(4, 32, device="meta")
    calls = {
        "gradients": (query.clone().requires_grad_(), key, value, cache),
        "gradients of keys": (query, key, value.clone().requires_grad_(), cache),
        "gradients of a cache": (query, key, value, cache.clone().requires_grad_()),
        "negated": (negated, key, value, cache),
        "no tensor": (query.numpy(), key, value, cache),
        "a list": (query, key, value, [cache]),
        "sparse": (query.to_sparse(), key, value, cache),
        "too few tokens": (query[1:], key, value, cache),
        "too few keys": (query, key[1:], value[1:], cache),
        "one key less": (query, key[1:], value, cache),
        "no values": (query, key, None, cache),
        "other heads": (query[:, :8], key, value, cache),
        "another dtype": (query, key.double(), value.double(), cache),
        "another cache's dtype": (query, key, value, cache.double()),
        "another device": (apart, key, value, cache),
        "a cache elsewhere": (query, key, value, cache.to("meta")),
        "three planes": (query, key, value, torch.cat([cache, cache[:1]])),
        "a flat cache with gaps": (query, key, value, cache.flatten(2)[..., ::2]),
    }
    scales = {
        "scale": {"k_scale": 0.5},
        "scale of a tensor": {"v_scale": torch.tensor(2.0)},
        "output": {"output": query[1:]},
        "type": {"attn_type": "encoder"},
    }
    good = query, key, value, cache
    return {name: (call, {}) for name, call in calls.items()} | {
        name: (good, options) for name, options in scales.items()
    }


@pytest.mark.parametrize("name", [*wrong_calls(*arrays_of(LAYERS[0], 3))])
def test_refusals_stay_in_later_layers(name):
    layer, held = LAYERS[0], Held(steps_of("decodes", lists=True)[0])
    arrays = arrays_of(layer, 3)
    layer.forward(*arrays, held.meta)
    before = arrays[-1].clone()
    call, options = wrong_calls(*arrays)[name]
    errors = []
    for meta in (held.fresh(), held.meta, held.meta):
        with pytest.raises(PagedAttentionError) as error:
            layer.forward(*call, meta, **options)
        errors.append((error.type, str(error.value)))
    assert errors[0] == errors[1] == errors[2]
    assert_same(arrays[-1], before)


@pytest.mark.parametrize("scale", [0.0, -1.0, torch.tensor(-1.0), torch.ones(3), "1", torch.nan])
def test_scales_are_checked_in_later_layers(scale):
    layer, held = LAYERS[5], Held(steps_of("decodes", lists=True)[0])
    arrays = arrays_of(layer, 3)
    layer.forward(*arrays, held.meta, k_scale=0.5)
    with pytest.raises(PagedAttentionError, match="scale"):
        layer.forward(*arrays, held.meta, k_scale=scale)


def test_layers_of_other_settings_keep_plans_of_their_own(plans):
    held = Held(steps_of("prompts", lists=True)[0])
    for _ in range(3):
        for layer in LAYERS:
            outcome(layer, arrays_of(layer, 10), "plain", lambda: held.meta)
    assert len(plans) == len(LAYERS)


def test_a_plan_for_other_threads_is_another(plans):
    if not can_load("numba", Framework.TORCH):
        pytest.skip("needs numba, whose plan holds the number of threads")
    held, layer = Held(steps_of("decodes", lists=True)[0]), NumbaImpl(4, 8, num_kv_heads=2)
    threads = torch.get_num_threads()
    try:
        for number in (threads, threads + 1, threads):
            torch.set_num_threads(number)
            outcome(layer, arrays_of(layer, 3), "plain", lambda: held.meta)
    finally:
        torch.set_num_threads(threads)
    assert len(plans) == 2


def test_captured_layers_plan_what_they_replay(plans, monkeypatch):
    """A graph computes the plan of each layer anew, of what the buffers then hold."""
    held, layer = Held(steps_of("decodes", lists=True)[0]), LAYERS[0]
    for place in (0, None, None, 0):  # None is within a capture
        monkeypatch.setattr(step, "_place", lambda device, place=place: place)
        outcome(layer, arrays_of(layer, 3), "plain", lambda: held.meta)
    assert len(plans) == 3
    layer.prepare(*arrays_of(layer, 3), held.meta)  # but for a step that was prepared
    monkeypatch.setattr(step, "_place", lambda device: None)
    outcome(layer, arrays_of(layer, 3), "plain", lambda: held.meta)
    assert len(plans) == 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_graph_that_is_captured_after_eager_layers_follows_the_buffers():
    first, second = (
        fields_of([1, 1, 1], lens, seed) for seed, lens in enumerate(STEPS["decodes"][1][:2])
    )
    on_gpu = {name: value.cuda() for name, value in first.items() if name in ARRAYS}
    meta = TorchSDPAMetadata(num_prefills=0, num_prefill_tokens=0, num_decode_tokens=3, **on_gpu)
    layer = LAYERS[0]
    *rows, cache = (array.cuda() for array in arrays_of(layer, 3))
    replayed = cache.clone()
    for _ in range(2):  # they leave a plan of the first step
        layer.forward(*rows, replayed, meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer.forward(*rows, replayed, meta)
    for fields in (first, second):
        for name in ARRAYS:
            on_gpu[name].copy_(fields[name])
        replayed.copy_(cache)
        graph.replay()
        fresh, own = TorchSDPAMetadata(**fields), cache.cpu()
        want = layer.forward(*(array.cpu() for array in rows), own, fresh)
        torch.testing.assert_close(out.cpu(), want, rtol=1e-4, atol=1e-5)
        assert_same(replayed.cpu(), own)


@pytest.mark.parametrize("inference", [False, True])
def test_changes_that_cannot_be_read_are_counted_or_nothing_is_shared(inference):
    """Tensors without values stand in for those of a GPU."""
    with torch.inference_mode(inference):
        there = torch.zeros(3, device="meta")
        changed = watch([there, there[1:]])
        if inference:
            assert changed is None
        else:
            assert not changed()
            there.add_(1)
            assert changed()


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda meta: pickle.loads(pickle.dumps(meta)),
    "replace": dataclasses.replace,
    "asdict_zerocopy": lambda meta: TorchSDPAMetadata(**meta.asdict_zerocopy()),
}


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", COPIES)
def test_metadata_is_copied_without_its_plans(plans, name, prepared):
    held, layer = Held(steps_of("mixed", lists=True)[0]), LAYERS[0]
    arrays = arrays_of(layer, 8)
    if prepared:
        layer.prepare(*arrays, held.meta)
    held.meta.note = "kept"
    want = outcome(layer, arrays, "plain", lambda: held.meta)
    other = COPIES[name](held.meta)
    assert other != held.meta
    assert_same_outcome(outcome(layer, arrays, "plain", lambda: other), want)
    assert len(plans) == 2
    assert name in ("replace", "asdict_zerocopy") or other.note == "kept"


def test_halves_follow_what_was_changed_in_place():
    held = Held(steps_of("mixed", lists=False)[0])
    assert held.meta.prefill_metadata.seq_lens == [5, 9]
    held.meta.seq_lens_tensor[0] += 2
    assert held.meta.prefill_metadata.seq_lens == [7, 9]
    assert held.meta.to_batch(BLOCK_SIZE).seq_lens.tolist() == [7, 9, 21]
    assert held.meta.get_seq_lens("decoder")[1] == [7, 9, 21]


def test_what_was_changed_in_place_outlives_an_assignment():
    """Engines count lengths up in place, and then assign the bound."""
    held = Held(steps_of("decodes", lists=True)[0])
    held.meta.seq_lens[0] += 1
    held.meta.seq_lens_tensor[0] += 1
    held.meta.max_decode_seq_len = 40
    assert held.meta.seq_lens == [2, 8, 21]


def test_the_callers_list_is_not_read_again():
    fields = steps_of("decodes", lists=True)[0]
    meta = TorchSDPAMetadata(**fields)
    fields["seq_lens"][0] = 9
    meta.max_decode_seq_len = 40
    assert meta.seq_lens == [1, 8, 21]
