"""The layers: every type of attention, every mix, held to the oracle; and what they refuse."""

import dataclasses
from unittest import mock

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from cases import SPECS, assert_words
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_interop import to_jax, to_torch
from torch_layers import (
    assert_close,
    assert_same,
    dense,
    hide_values,
    layer_of,
    new_layer,
    normal,
    reference,
    spec_of,
    step_of,
    tensor,
)

from pagedattn import (
    AttentionSpec,
    BackendUnavailableError,
    InvalidInputError,
    KVCache,
    UnsupportedError,
    make_batch,
    paged_attention,
)
from pagedattn._dispatch import registry
from pagedattn._dispatch.call import call_of
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.strategies import BUCKETS, problems, seeds
from pagedattn_torch import AttentionMetadata, AttentionType, IpexAttnBackendImpl
from pagedattn_torch import step as torch_step
from pagedattn_torch.backends import ipex

pytestmark = pytest.mark.usefixtures("layers")
BUCKET = BUCKETS[0]
CAUSAL = {name: spec for name, spec in SPECS.items() if spec.causal}
TIGHT = {"atol": 2e-5, "rtol": 2e-5}
LENS = st.lists(st.integers(0, 9), min_size=1, max_size=4)
UNCACHED = ("encoder", "encoder_only")


@st.composite
def causal_problems(draw, **fields):
    spec = draw(st.sampled_from(list(CAUSAL.values())))
    return draw(problems(spec=spec, bucket=BUCKET, **fields))


def encoder_meta(lens, **fields):
    return AttentionMetadata(
        num_prefills=len(lens),
        num_prefill_tokens=0,
        num_decode_tokens=0,
        encoder_seq_lens=lens,
        **fields,
    )


def prompt_meta(lens, **fields):
    return AttentionMetadata(
        num_prefills=len(lens),
        num_prefill_tokens=sum(lens),
        num_decode_tokens=0,
        seq_lens=lens,
        **fields,
    )


def uncached_meta(kind, lens):
    return encoder_meta(lens) if kind == "encoder" else prompt_meta(lens)


@given(problem=causal_problems())
def test_decoders_match_the_oracle(problem):
    """Prompts, chunks on a cached prefix, decodes and any mix, in every dtype; NaN elsewhere."""
    step = step_of(problem)
    out = layer_of(problem).forward(*step)
    assert out.shape == step.query.shape
    assert_attention_close(out, None, problem, name="layer")


@given(problem=causal_problems(dtype=np.float32))
def test_the_write_is_exactly_the_new_tokens(problem):
    step = step_of(problem)
    before = step.kv_cache.clone().flatten(1, 2)
    layer_of(problem).forward(*step)
    slots = step.attn_metadata.slot_mapping.long()
    live = slots >= 0
    before[0, slots[live]], before[1, slots[live]] = step.key[live], step.value[live]
    assert_same(step.kv_cache.flatten(1, 2), before)


@given(problem=causal_problems(dtype=np.float32))
def test_halves_give_what_the_whole_gives(problem):
    """Prefill and decode metadata, run one after the other."""
    whole, parts = step_of(problem), step_of(problem)
    layer, meta = layer_of(problem), parts.attn_metadata
    want = layer.forward(*whole)
    begin = 0
    for half in (meta.prefill_metadata, meta.decode_metadata):
        if half is not None:
            rows = slice(begin, begin + len(half.slot_mapping))
            got = layer.forward(*(x[rows] for x in parts[:3]), parts.kv_cache, half)
            torch.testing.assert_close(got, want[rows], **TIGHT)
            begin = rows.stop
    assert_same(parts.kv_cache, whole.kv_cache)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_forms(flat, packed):
    """Packed heads or not, a flat cache or not: the same, in the query's form."""
    problem = random_problem([5, 3, 1], [5, 9, 17], SPECS["all"])
    want = reference(problem)
    query, key, value, kv_cache, meta = step_of(problem)
    if packed:
        query, key, value = (x.flatten(1) for x in (query, key, value))
    kv_cache = kv_cache.flatten(2) if flat else kv_cache
    out = layer_of(problem).forward(query, key, value, kv_cache, meta)
    assert out.shape == query.shape
    assert_close(out, want, **TIGHT)


def test_keywords_and_types():
    problem = random_problem([3], [7], AttentionSpec())
    step, layer = step_of(problem), layer_of(problem, attn_type="decoder")
    want = layer.forward(*step)
    for kind in ("decoder", AttentionType.DECODER, None):
        out = layer.forward(**step_of(problem)._asdict(), k_scale=1.0, v_scale=1.0, attn_type=kind)
        assert torch.equal(out, want)
    encoder = layer_of(problem, attn_type="encoder_only")
    assert encoder.attn_type is AttentionType.ENCODER_ONLY


@pytest.mark.parametrize("kind", UNCACHED)
@pytest.mark.parametrize("name", SPECS)
def test_encoders_see_both_ways(kind, name):
    """Windows stay symmetric; the cache given is not written."""
    lens = [7, 1, 12]
    problem = random_problem(lens, lens, SPECS[name])
    layer = layer_of(problem)
    query, key, value = normal(1, 20, 4, 16), normal(2, 20, 2, 16), normal(3, 20, 2, 16)
    kv_cache = torch.zeros(2, 8, 4, 2, 16)
    out = layer.forward(query, key, value, kv_cache, uncached_meta(kind, lens), attn_type=kind)
    spec = dataclasses.replace(SPECS[name], causal=False)
    assert_close(out, dense(query, key, value, lens, lens, spec), **TIGHT)
    assert not kv_cache.any()


@given(lens=LENS, data=st.data(), seed=seeds())
def test_encoders_of_any_lengths(lens, data, seed):
    kind = data.draw(st.sampled_from(UNCACHED))
    spec = data.draw(st.sampled_from(list(SPECS.values())))
    tokens = sum(lens)
    layer = layer_of(random_problem([1], [1], spec))
    query, key, value = (normal(seed % 2**31 + i, tokens, h, 16) for i, h in enumerate((4, 2, 2)))
    out = layer.forward(query, key, value, None, uncached_meta(kind, lens), attn_type=kind)
    spec = dataclasses.replace(spec, causal=False)
    assert_close(out, dense(query, key, value, lens, lens, spec), **TIGHT)


@pytest.mark.parametrize("cache", [None, torch.tensor([]), torch.zeros(2, 0, 4, 2, 16)])
@pytest.mark.parametrize("name", SPECS)
def test_profiling_runs_need_no_cache(name, cache):
    lens = [6, 3]
    layer = layer_of(random_problem([1], [1], SPECS[name]))
    query, key, value = normal(1, 9, 4, 16), normal(2, 9, 2, 16), normal(3, 9, 2, 16)
    meta = prompt_meta(lens, slot_mapping=torch.full((9,), -1))
    out = layer.forward(query, key, value, cache, meta)
    want = dense(query, key, value, lens, lens, spec_of(layer, "decoder"))
    assert_close(out, want, **TIGHT)


@pytest.mark.parametrize("tables", [None, torch.tensor([]), torch.zeros(2, 0, dtype=torch.int32)])
def test_prompts_without_tables_are_written_and_see_themselves(tables):
    lens = [6, 3]
    layer = layer_of(random_problem([1], [1], SPECS["sliding_window"]))
    query, key, value = normal(1, 9, 4, 16), normal(2, 9, 2, 16), normal(3, 9, 2, 16)
    kv_cache, slots = torch.zeros(2, 4, 4, 2, 16), torch.tensor([8, 9, 10, 11, 0, 1, 4, 5, 6])
    meta = prompt_meta(lens, slot_mapping=slots, block_tables=tables)
    out = layer.forward(query, key, value, kv_cache, meta)
    want = dense(query, key, value, lens, lens, spec_of(layer, "decoder"))
    assert_close(out, want, **TIGHT)
    assert torch.equal(kv_cache.flatten(1, 2)[:, slots], torch.stack([key, value]))


@given(queries=LENS, data=st.data(), seed=seeds())
def test_cross_attention(queries, data, seed):
    """Keys written with the first step, then found in the cache."""
    keys = data.draw(st.lists(st.integers(0, 11), min_size=len(queries), max_size=len(queries)))
    spec = dataclasses.replace(data.draw(st.sampled_from(list(SPECS.values()))), causal=False)
    layer = layer_of(random_problem([1], [1], spec), attn_type="encoder_decoder")
    rng = np.random.default_rng(seed)
    blocks = iter(rng.permutation(16))
    tables = [[next(blocks) for _ in range(-(-n // 4))] for n in keys]
    meta = AttentionMetadata.from_lists(
        queries,
        [0] * len(queries),
        [[20 + 3 * s, 21 + 3 * s, 22 + 3 * s] for s in range(len(queries))],
        block_size=4,
        encoder_lens=keys,
        cross_block_tables=tables,
    )
    query = normal(seed % 2**31, sum(queries), 4, 16)
    key, value = (normal(seed % 2**31 + i, sum(keys), 2, 16) for i in (1, 2))
    kv_cache = torch.full((2, 16, 4, 2, 16), torch.nan)
    want = dense(query, key, value, queries, keys, spec)
    assert_close(layer.forward(query, key, value, kv_cache, meta), want, **TIGHT)
    before = kv_cache.clone()
    assert_close(layer.forward(query, None, None, kv_cache, meta), want, **TIGHT)
    assert_same(kv_cache, before)
    assert_close(layer.forward(query, key, value, None, meta), want, **TIGHT)  # profiling


def test_mixed_cross_attention():
    """One sequence brings its encoder's keys, the other's are cached, in one call."""
    meta = AttentionMetadata.from_lists(
        [3, 1],
        [0, 5],
        [[9], [10, 11]],
        block_size=4,
        encoder_lens=[6, 7],
        cross_block_tables=[[2, 5], [1, 0]],
    )
    layer = new_layer(4, 16, num_kv_heads=2)
    kv_cache = normal(0, 2, 12, 4, 2, 16)
    query, key, value = normal(1, 4, 4, 16), normal(2, 6, 2, 16), normal(3, 6, 2, 16)
    cached = kv_cache[:, [1, 0]].flatten(1, 2)[:, :7]
    out = layer.forward(query, key, value, kv_cache, meta, attn_type="encoder_decoder")
    rows = (torch.cat([new, old]) for new, old in zip((key, value), cached, strict=True))
    want = dense(query, *rows, [3, 1], [6, 7], spec_of(layer, "encoder_decoder"))
    assert_close(out, want, **TIGHT)
    own = layer.forward(
        *(normal(i, 6, h, 16) for i, h in ((4, 4), (5, 2), (6, 2))), None, meta, attn_type="encoder"
    )
    assert own.shape == (6, 4, 16)


def test_decoders_may_share_the_keys_of_another_layer():
    """No key: nothing is written, and the cache is read as it stands."""
    problem = random_problem([3, 1], [7, 9], AttentionSpec())
    step = step_of(problem)
    kv_cache = torch.stack([tensor(problem.key_cache), tensor(problem.value_cache)])
    out = layer_of(problem).forward(step.query, None, None, kv_cache, step.attn_metadata)
    assert_attention_close(out, None, problem)


def test_padding_rows_are_zero():
    problem = random_problem([3, 1, 0], [3, 5, 0], AttentionSpec(), pad_tokens=8)
    out = layer_of(problem).forward(*step_of(problem))
    assert out[:4].abs().amin() > 0
    assert not out[4:].any()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@given(data=st.data())
def test_parity_with_jax(dtype, data):
    """One request through JAX and through a layer, all tensors crossing by DLPack in place."""
    problem = data.draw(causal_problems(dtype=dtype))
    query, batch = jnp.asarray(problem.query), batch_of(problem)
    meta = AttentionMetadata.from_batch(batch)
    step = step_of(problem)
    held = KVCache(*(jnp.array(to_jax(plane), copy=True) for plane in step.kv_cache))
    rows = [jnp.asarray(to_jax(x)) for x in (step.key, step.value)]
    tensors = query, *rows, held.key, held.value
    shared = to_torch(tensors)
    for array, view in zip(tensors, shared, strict=True):
        assert view.data_ptr() == array.unsafe_buffer_pointer()
    layer = layer_of(problem)
    out = layer.forward(*shared[:3], KVCache(*shared[3:]), meta)
    asked = query, cache_of(problem), batch, problem.spec
    want = paged_attention(*asked, backend=layer.backend_of(call_of(*asked)))
    assert to_jax(out).unsafe_buffer_pointer() == out.data_ptr()
    if not meta.num_prefills or meta.context_lens_tensor.all():  # the same keys from the same place
        np.testing.assert_array_equal(np.asarray(to_jax(out)), np.asarray(want))
    xla = paged_attention(query, cache_of(problem), batch, problem.spec, backend="xla")
    assert_attention_close(xla, None, problem, name="xla")
    assert_attention_close(to_jax(out), None, problem, name="layer")


@pytest.fixture
def unread(monkeypatch):
    hide_values(monkeypatch)


@pytest.mark.usefixtures("unread")
def test_lengths_on_a_device_are_never_read():
    """Bounds that need not be tight take the place of lengths; splits need no lengths either."""
    problem = random_problem([6, 7, 1, 1], [6, 19, 22, 9], SPECS["sliding_window"])
    query, key, value, kv_cache, meta = step_of(problem, num_prefills=2, num_prefill_tokens=13)
    assert meta.seq_lens is meta.max_prefill_seq_len is None
    layer, want = layer_of(problem), reference(problem)
    assert_close(layer.forward(query, key, value, kv_cache.clone(), meta), want, **TIGHT)
    for half, rows in ((meta.prefill_metadata, slice(13)), (meta.decode_metadata, slice(13, 15))):
        out = layer.forward(*(x[rows] for x in (query, key, value)), kv_cache, half)
        assert_close(out, want[rows], **TIGHT)
    with pytest.raises(InvalidInputError, match="GPU"):
        meta.get_seq_lens("decoder")


@pytest.mark.usefixtures("unread")
def test_encoders_on_a_device():
    lens = torch.tensor([5, 3], dtype=torch.int32)
    layer = new_layer(4, 16, num_kv_heads=2)
    own = normal(1, 8, 4, 16), normal(2, 8, 2, 16), normal(3, 8, 2, 16)
    meta = AttentionMetadata(
        num_prefills=2,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        encoder_seq_lens_tensor=lens,
        max_encoder_seq_len=8,
        num_encoder_tokens=8,
    )
    out = layer.forward(*own, None, meta, attn_type="encoder")
    assert_close(out, dense(*own, [5, 3], [5, 3], spec_of(layer, "encoder")), **TIGHT)


SIZES = {"num_heads": 4, "head_size": 16, "num_kv_heads": 2}
UNSUPPORTED = {
    "kv_cache_dtype": {"kv_cache_dtype": "nvfp4"},
    "blocksparse": {"blocksparse_params": {"local_blocks": 4}},
}


@pytest.mark.parametrize("feature", UNSUPPORTED)
def test_constructors_refuse_by_name(feature):
    with pytest.raises(UnsupportedError, match=feature):
        new_layer(**SIZES, **UNSUPPORTED[feature])


BAD_LAYERS = {
    "num_heads": {"num_kv_heads": 3},
    "alibi_slopes": {"alibi_slopes": [0.5, 0.25]},
    "sliding_window": {"sliding_window": 0},
    "logits_soft_cap": {"logits_soft_cap": 0},
    "head_size": {"head_size": 0},
    "attn_type": {"attn_type": "prefix"},
}


@pytest.mark.parametrize("word", BAD_LAYERS)
def test_constructors_check_values(word):
    with pytest.raises(InvalidInputError, match=word):
        new_layer(**SIZES | BAD_LAYERS[word])


def test_slopes_of_every_form():
    slopes = (0.5, -0.25, 0.125, 1.0)
    for given_ in (slopes, list(slopes), torch.tensor(slopes), np.array(slopes)):
        assert spec_of(new_layer(**SIZES, alibi_slopes=given_), "decoder") == (
            AttentionSpec(alibi_slopes=slopes)
        )


def changed(step, **fields):
    return step._replace(**fields)


BAD_CALLS = {
    "key alone": (lambda s: changed(s, value=None), {}, ["key alone"]),
    "value alone": (lambda s: changed(s, key=None), {}, ["value alone"]),
    "no cross": (lambda s: s, {"attn_type": "encoder_decoder"}, ["encoder_seq_lens"]),
    "no encoder": (lambda s: s, {"attn_type": "encoder"}, ["encoder_seq_lens"]),
    "unknown type": (lambda s: s, {"attn_type": "prefix"}, ["encoder_only", "'prefix'"]),
    "query tokens": (lambda s: changed(s, query=s.query[:-1]), {}, ["9", "8"]),
    "key tokens": (lambda s: changed(s, key=s.key[:-1], value=s.value[:-1]), {}, ["9", "8"]),
    "unequal": (lambda s: changed(s, value=s.value[:-1]), {}, ["9 keys", "8 values"]),
    "query heads": (lambda s: changed(s, query=s.query[:, :3]), {}, ["query", "64"]),
    "key heads": (lambda s: changed(s, key=s.key[:, :1]), {}, ["key", "32"]),
    "cache heads": (lambda s: changed(s, kv_cache=s.kv_cache[:, :, :, :1]), {}, ["kv_cache"]),
    "cache dtype": (lambda s: changed(s, kv_cache=s.kv_cache.half()), {}, ["float16"]),
    "cache planes": (lambda s: changed(s, kv_cache=s.kv_cache[0]), {}, ["kv_cache"]),
    "metadata": (lambda s: changed(s, attn_metadata=None), {}, ["attn_metadata"]),
    "no key at all": (
        lambda s: changed(s, key=None, value=None, kv_cache=None),
        {},
        ["key and value"],
    ),
}
BAD_VALUES = {
    "small cache": (lambda s: changed(s, kv_cache=s.kv_cache[:, :3]), {}, ["slot_mapping"]),
    "context without a cache": (lambda s: changed(s, kv_cache=None), {}, ["context_lens"]),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_leave_the_cache(name):
    refuse_and_leave_the_cache(*BAD_CALLS[name])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_leave_the_cache(name):
    """On a GPU they are not looked at: that would wait for it."""
    refuse_and_leave_the_cache(*BAD_VALUES[name])


def refuse_and_leave_the_cache(change, options, words):
    problem = random_problem([5, 3, 1], [5, 9, 17], AttentionSpec())
    step, layer = step_of(problem), layer_of(problem)
    before = step.kv_cache.clone()
    with pytest.raises(InvalidInputError) as error:
        layer.forward(*change(step), **options)
    assert_words(error, words)
    assert_same(step.kv_cache, before)


def meta_with(problem, **fields):
    meta = step_of(problem).attn_metadata.asdict_zerocopy({"max_query_len", "is_prompt"})
    return AttentionMetadata(**meta | fields)


BAD_FIELDS = {
    "no slots": (lambda m: {"slot_mapping": None}, ["slot_mapping"]),
    "two tokens in a slot": (lambda m: {"slot_mapping": m.slot_mapping[[0, 0, *range(2, 9)]]}, []),
    "slot outside": (lambda m: {"slot_mapping": m.slot_mapping.long() + 1000}, ["slot"]),
    "slots elsewhere": (
        lambda m: {"slot_mapping": m.slot_mapping[[1, 0, *range(2, 9)]]},
        ["token 0"],
    ),
    "narrow tables": (lambda m: {"block_tables": m.block_tables[:, :2]}, ["seq_lens"]),
    "few tables": (lambda m: {"block_tables": m.block_tables[:2]}, ["block_tables"]),
    "block outside": (lambda m: {"block_tables": m.block_tables + 1000}, []),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", BAD_FIELDS)
def test_bad_metadata_leaves_the_cache(name):
    change, words = BAD_FIELDS[name]
    problem = random_problem([5, 3, 1], [5, 9, 17], AttentionSpec())
    step, layer = step_of(problem), layer_of(problem)
    before = step.kv_cache.clone()
    meta = meta_with(problem, **change(step.attn_metadata))
    with pytest.raises(InvalidInputError) as error:
        layer.forward(*step[:4], meta)
    assert_words(error, words)
    assert_same(step.kv_cache, before)


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
def test_scales_other_than_one_are_refused(scale):
    problem = random_problem([3], [3], AttentionSpec())
    step = step_of(problem)
    before = step.kv_cache.clone()
    with pytest.raises(UnsupportedError, match=scale):
        layer_of(problem).forward(*step, **{scale: 0.5})
    assert_same(step.kv_cache, before)


def test_gradients_are_refused_before_the_write():
    problem = random_problem([3], [3], AttentionSpec())
    step = step_of(problem)
    before = step.kv_cache.clone()
    with pytest.raises(UnsupportedError, match="gradients"):
        layer_of(problem).forward(step.query.requires_grad_(), *step[1:])
    assert_same(step.kv_cache, before)


def test_metadata_may_come_from_any_batch():
    batch = make_batch([2], [3], [[1, 0]], block_size=4, pad_tokens=4, pad_seqs=2)
    layer = new_layer(**SIZES)
    kv_cache = normal(0, 2, 2, 4, 2, 16)
    rows = normal(1, 4, 4, 16), normal(2, 4, 2, 16), normal(3, 4, 2, 16)
    out = layer.forward(*rows, kv_cache, AttentionMetadata.from_batch(batch))
    assert not out[2:].any()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_whatever_requires_grad_is_refused_before_the_write(name):
    problem = random_problem([3], [3], AttentionSpec())
    step = step_of(problem)
    before = step.kv_cache.clone()
    tracked = step._replace(**{name: getattr(step, name).requires_grad_()})
    with pytest.raises(UnsupportedError, match="gradients"):
        layer_of(problem).forward(*tracked)
    assert_same(step.kv_cache, before)
    with torch.no_grad():
        layer_of(problem).forward(*tracked)
    assert not step.kv_cache.requires_grad


NO_TENSOR = {
    "query": lambda step: step.query.tolist(),
    "key": lambda step: step.key.cpu().numpy(),
    "kv_cache": lambda step: step.kv_cache.cpu().numpy(),
}


@pytest.mark.parametrize("name", NO_TENSOR)
def test_what_is_no_tensor_is_named(name):
    problem = random_problem([3], [3], AttentionSpec())
    step = step_of(problem)
    with pytest.raises(InvalidInputError, match=f"{name} must be a torch tensor"):
        layer_of(problem).forward(*step._replace(**{name: NO_TENSOR[name](step)}))


@pytest.mark.parametrize("slopes", [1.0, torch.tensor(1.0), "slopes", torch.ones(4, 2)])
def test_slopes_are_one_number_a_head(slopes):
    with pytest.raises(InvalidInputError, match="alibi_slopes"):
        new_layer(**SIZES, alibi_slopes=slopes)


@pytest.mark.parametrize("scale", [1, torch.tensor(1.0), torch.ones(1, dtype=torch.bfloat16)])
def test_scales_of_one_in_any_form(scale):
    problem = random_problem([3], [3], AttentionSpec())
    out = layer_of(problem).forward(*step_of(problem), k_scale=scale, v_scale=scale)
    assert_same(out, layer_of(problem).forward(*step_of(problem)))


def test_a_scale_elsewhere_is_not_read():
    problem = random_problem([3], [3], AttentionSpec())
    elsewhere = torch.ones((), device="meta")
    with pytest.raises(UnsupportedError, match="v_scale is a tensor on meta"):
        layer_of(problem).forward(*step_of(problem), v_scale=elsewhere)


def test_metadata_of_small_integers():
    """Lengths and starts of uint8, whose differences would wrap."""
    problem = random_problem([5, 3, 1], [5, 9, 100], AttentionSpec())
    step, layer = step_of(problem), layer_of(problem)
    fields = batch_of(problem)
    arrays = (f.name for f in dataclasses.fields(fields) if not f.metadata.get("static"))
    names = [name for name in arrays if getattr(fields, name) is not None]
    small = {
        name: tensor(getattr(fields, name)).clamp(min=0).to(torch.int16)
        if name == "slot_mapping"
        else tensor(getattr(fields, name)).clamp(min=0).to(torch.uint8)
        for name in names
    }
    meta = AttentionMetadata.from_batch(
        dataclasses.replace(fields, **small), num_prefills=2, num_prefill_tokens=8
    )
    out = layer.forward(*step[:4], meta)
    assert_close(out, reference(problem), atol=1e-5)


def test_a_kernel_that_fails_has_written_the_new_tokens_and_nothing_else(monkeypatch):
    """As it may by lack of memory. The same call again then gives what it would have given."""
    problem = random_problem([5, 3, 1], [5, 9, 17], SPECS["plain"])
    layer, step = layer_of(problem), step_of(problem)
    before, want = step.kv_cache.clone(), reference(problem)
    with monkeypatch.context() as patch:
        patch.setattr(torch_step.Step, "run", mock.Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            layer.forward(*step)
    slots = step.attn_metadata.slot_mapping
    slots = slots[slots >= 0].long()
    before.flatten(1, 2)[:, slots] = step.kv_cache.flatten(1, 2)[:, slots]
    assert_same(step.kv_cache, before)
    assert_close(layer.forward(*step), want, **TIGHT)


@pytest.fixture
def forgotten():
    """Backends are looked for anew, and what was found is forgotten."""
    registry.tried.cache_clear()
    yield
    registry.tried.cache_clear()


@pytest.mark.usefixtures("on_cpu", "forgotten")
@pytest.mark.parametrize("lens", [([5, 3, 1], [5, 9, 17]), ([5, 3], [5, 3])])
def test_alibi_of_prompts_without_a_kernel_for_it(monkeypatch, lens):
    """The class of Intel's extension computes it by SDPA; without the extension it says so."""
    problem = random_problem(*lens, SPECS["alibi_slopes"])
    layer = IpexAttnBackendImpl(4, 16, num_kv_heads=2, alibi_slopes=problem.spec.alibi_slopes)
    monkeypatch.setattr(ipex, "why_unusable", lambda: ["nothing is installed"])
    with pytest.raises(BackendUnavailableError, match="nothing is installed"):
        layer.forward(*step_of(problem))
    registry.tried.cache_clear()  # as a process would find it in which it is installed
    monkeypatch.setattr(ipex, "why_unusable", list)
    assert_close(layer.forward(*step_of(problem)), reference(problem), **TIGHT)


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", ["decoder", "encoder", "encoder_only"])
def test_bounds_may_be_far_too_wide(name, cached):
    """They bound lengths, as engines know them before the step: tables are no wider for it."""
    layer, rows = new_layer(4, 16, num_kv_heads=2), [normal(n, 5, n, 16) for n in (4, 2, 2)]
    outs = []
    for longest in (3, 2**31 - 1):
        kv_cache = torch.zeros(2, 4, 4, 2, 16) if cached else None
        meta = AttentionMetadata(
            num_prefills=2,
            num_prefill_tokens=5,
            num_decode_tokens=0,
            slot_mapping=torch.tensor([0, 1, 2, 4, 5]),
            seq_lens=[3, 2],
            block_tables=torch.tensor([[0], [1]]),
            max_query_len=longest,
            encoder_seq_lens=[3, 2],
            num_encoder_tokens=5,
            max_encoder_seq_len=longest,
        )
        outs.append(layer.forward(*rows, kv_cache, meta, attn_type=name))
    assert_same(*outs)
