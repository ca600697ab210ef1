"""Forty ways in which paged attention has gone wrong elsewhere, each as a test of the layers.

The numbers are only a count. All are held to the float64 oracle, or to what must not happen.
"""

import warnings

import ml_dtypes
import numpy as np
import pytest
import torch
from cases import SIGNED
from torch.utils._python_dispatch import TorchDispatchMode
from torch_layers import (
    assert_close,
    dense,
    layer_of,
    new_layer,
    normal,
    reference,
    spec_of,
    step_of,
)

from pagedattn import AttentionSpec, InvalidInputError, KVCache, UnsupportedError, alibi_bias
from pagedattn.testing import assert_attention_close, random_problem, reference_attention
from pagedattn_torch import AttentionMetadata, TorchSDPABackend, pack_keys, write_kv_

pytestmark = pytest.mark.usefixtures("layers")
PREFILL, CHUNK, DECODE = ([9, 17], [9, 17]), ([5, 8], [9, 17]), ([1, 1], [9, 17])
PHASES = {"prefill": PREFILL, "chunk": CHUNK, "decode": DECODE}
MIXED = ([6, 7, 1, 1], [6, 19, 22, 9])
KERNELS = "scaled_dot_product", "single_query", "flash_attn_varlen"
of_sdpa = pytest.mark.parametrize("layers", ["sdpa"], indirect=True)
TIGHT = {"atol": 1e-5, "rtol": 1e-5}


def forward(problem, **options):
    return layer_of(problem).forward(*step_of(problem), **options)


def check(lens, spec=AttentionSpec(), **sizes):
    """The layer on some lengths, NaN wherever nobody may look; gives its out."""
    problem = random_problem(*lens, spec, **sizes)
    out = forward(problem)
    assert_attention_close(out, None, problem, name="layer")
    return out


def prompts(lens, **fields):
    return AttentionMetadata(
        num_prefills=len(lens),
        num_prefill_tokens=sum(lens),
        num_decode_tokens=0,
        seq_lens=lens,
        **fields,
    )


class Calls(TorchDispatchMode):
    """Records the calls of torch's attention kernels."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in KERNELS):
            self.seen.append((args, kwargs or {}))
        return func(*args, **kwargs or {})


# Positions and biases


def test_01_alibi_distances_are_exact_at_100_000_tokens_in_bfloat16():
    distances = alibi_bias(torch.tensor([99_999]), torch.arange(100_000), (1.0,))
    assert torch.equal(distances[0, 0].double(), torch.arange(-99_999.0, 1.0).double())
    spec = AttentionSpec(alibi_slopes=(2.0**-10,))
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "block_size": 1000}
    check(([1], [100_000]), spec, dtype=ml_dtypes.bfloat16, **sizes)


@pytest.mark.usefixtures("on_cpu")
def test_02_alibi_of_a_decode_is_the_last_row_of_the_prefill():
    spec = AttentionSpec(alibi_slopes=SIGNED)
    tables = [[0, 1, 2, 3, 4]]
    prefill = AttentionMetadata.from_lists([17], [0], tables, block_size=4)
    decode = AttentionMetadata.from_lists([1], [16], tables, block_size=4)
    (whole,), (last,) = (meta.get_attn_bias("decoder", spec) for meta in (prefill, decode))
    assert torch.equal(whole[:, -1:], last)
    assert not last[:, 0, -1].any()  # the newest token's own is 0


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15])
def test_03_lengths_need_no_alignment_for_a_bias(length):
    check(([length, 1], [length, length]), AttentionSpec(alibi_slopes=SIGNED), head_dim=20)


def test_04_negative_slopes_hide_nothing():
    check(MIXED, AttentionSpec(alibi_slopes=(-0.7, -0.3, -0.05, -1.1)))


def test_05_alibi_within_a_window_counts_absolute_positions():
    check(MIXED, AttentionSpec(alibi_slopes=SIGNED, sliding_window=5))


def test_06_a_slope_belongs_to_a_query_head():
    check(MIXED, AttentionSpec(alibi_slopes=SIGNED), num_heads=4, num_kv_heads=2)
    check(MIXED, AttentionSpec(alibi_slopes=SIGNED), num_heads=4, num_kv_heads=1)


# Windows


@pytest.mark.parametrize("window", [1, 3, 4, 5, 100])
def test_07_a_window_shows_itself_and_window_minus_one_more(window):
    """Uniform attention over values that are powers of two tells which keys were seen."""
    layer = new_layer(1, 8, sliding_window=window)
    query, value = torch.zeros(12, 1, 8), torch.zeros(12, 1, 8)
    value[:, 0, 0] = 2.0 ** torch.arange(12)
    out = layer.forward(query, query, value, None, prompts([12]))[:, 0, 0]
    for i in range(12):
        seen = range(max(0, i - window + 1), i + 1)
        assert out[i].item() == pytest.approx(sum(2.0**j for j in seen) / len(seen))


@pytest.mark.parametrize("window", [1, 3, 4, 5])
def test_08_the_window_is_the_same_in_prefill_chunk_and_decode(window):
    spec = AttentionSpec(sliding_window=window)
    prefill = random_problem([17], [17], spec, poison=None)
    want = forward(prefill)
    for new in (9, 1):
        part = prefill.replace(query=prefill.query[-new:], query_lens=[new])
        torch.testing.assert_close(forward(part), want[-new:], **TIGHT)
    assert_attention_close(want, None, prefill)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only"])
def test_09_a_window_without_causality_looks_both_ways(kind):
    layer = new_layer(2, 8, sliding_window=3)
    own = normal(0, 3, 11, 2, 8)
    fields = {"encoder_seq_lens": [11]} if kind == "encoder" else {}
    out = layer.forward(*own, None, prompts([11], **fields), attn_type=kind)
    spec = AttentionSpec(causal=False, sliding_window=3)
    assert_close(out, dense(*own, [11], [11], spec), **TIGHT)
    causal = dense(*own, [11], [11], AttentionSpec(sliding_window=3))
    assert np.abs(out.numpy() - causal).max() > 0.1


def test_10_masks_are_minus_infinity_and_each_layer_has_its_own():
    """Two layers of one step with other windows; hidden keys that shout stay unheard."""
    problem = random_problem([1], [20], AttentionSpec(sliding_window=4), poison=None)
    key = problem.key_cache * 1e4
    for window in (4, 9, None):
        spec = AttentionSpec(sliding_window=window)
        shouting = problem.replace(key_cache=key, spec=spec)
        assert_close(forward(shouting), reference(shouting), atol=1e-4)
    step = step_of(problem)
    outs = [
        layer_of(problem.replace(spec=AttentionSpec(sliding_window=window))).forward(*step)
        for window in (4, 9, 4)
    ]
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])


def test_11_a_window_over_a_cached_prefix_goes_by_absolute_position():
    check(([6, 5, 9], [30, 21, 9]), AttentionSpec(sliding_window=7))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_12_keys_behind_the_window_may_be_nan(poison):
    problem = random_problem([1, 3], [33, 29], AttentionSpec(sliding_window=5), poison=poison)
    assert_attention_close(forward(problem), None, problem)


# Masks and empties


def test_13_causal_chunks_are_aligned_to_the_end_of_the_keys():
    check(([3, 2], [19, 5]))


def test_14_a_row_that_sees_no_key_is_zero():
    meta = AttentionMetadata.from_lists(
        [3], [0], [[0]], block_size=4, encoder_lens=[0], cross_block_tables=[[]]
    )
    layer = new_layer(2, 8)
    query, nothing = normal(0, 3, 2, 8), torch.zeros(0, 2, 8)
    for cache in (None, normal(1, 2, 4, 4, 2, 8)):
        out = layer.forward(query, nothing, nothing, cache, meta, attn_type="encoder_decoder")
        assert out.shape == query.shape
        assert not out.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_15_nan_in_what_is_masked_does_not_spread(poison):
    problem = random_problem(*MIXED, AttentionSpec(), poison=poison, pad_tokens=20)
    assert_attention_close(forward(problem), None, problem)


@of_sdpa
def test_16_a_mask_and_is_causal_are_never_passed_together():
    for spec in (AttentionSpec(), AttentionSpec(sliding_window=3)):
        problem = random_problem(*MIXED, spec)
        with Calls() as calls:
            forward(problem)
        assert calls.seen
        for args, kwargs in calls.seen:
            assert True not in [arg for arg in args if isinstance(arg, bool)]
            assert not kwargs.get("is_causal", False)


@pytest.mark.parametrize("queries", [[0], [0, 0], [3, 0], [0, 1], [3, 0, 1], [3, 1], [1], [3]])
def test_17_every_mix_of_nothing_prefill_and_decode(queries):
    contexts = [0 if q == 3 else 6 for q in queries]
    problem = random_problem(
        queries, [q + c for q, c in zip(queries, contexts, strict=True)], AttentionSpec()
    )
    assert_attention_close(forward(problem), None, problem)


def test_18_a_decode_without_keys_is_zero():
    """Cross-attention to an empty encoder sequence, with a neighbour that has keys."""
    meta = AttentionMetadata.from_lists(
        [1, 1],
        [4, 4],
        [[0, 1], [2, 3]],
        block_size=4,
        encoder_lens=[0, 5],
        cross_block_tables=[[], [1, 2]],
    )
    layer = new_layer(2, 8)
    cache = normal(0, 2, 4, 4, 2, 8)
    out = layer.forward(normal(1, 2, 2, 8), None, None, cache, meta, attn_type="encoder_decoder")
    assert not out[0].any()
    assert out[1].abs().min() > 0


def test_19_padding_of_a_captured_batch_touches_no_one():
    """Rows with slot -1, length 1 or 0 and block 0, which holds NaN."""
    problem = random_problem(
        [1, 1], [9, 5], AttentionSpec(), num_blocks=9, block_tables=[[3, 4, 5], [6, 7, 0]]
    )
    query, key, value, kv_cache, meta = step_of(problem)
    assert torch.isnan(kv_cache[:, 0]).all()

    def pad(rows):
        return torch.cat([rows, rows[:1].expand(2, *rows.shape[1:])])

    padded = AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=4,
        slot_mapping=torch.cat([meta.slot_mapping, meta.slot_mapping.new_full((2,), -1)]),
        seq_lens=[9, 5, 1, 0],
        block_tables=torch.cat([meta.block_tables, meta.block_tables.new_zeros(2, 3)]),
    )
    out = layer_of(problem).forward(pad(query), pad(key), pad(value), kv_cache, padded)
    assert_close(out[:2], reference(problem), **TIGHT)
    assert not out[3].any()
    assert torch.isnan(kv_cache[:, 0]).all()


# Slots, tables, caches


def test_20_slot_minus_one_is_dropped_and_does_not_wrap():
    planes = torch.zeros(2, 3, 4, 1, 8)
    rows = torch.ones(3, 1, 8)
    write_kv_(KVCache(*planes), rows, rows, torch.tensor([-1, 5, -1]))
    assert planes.sum(dim=(0, 3, 4)).flatten().nonzero().tolist() == [[5]]


@pytest.mark.parametrize("filler", [0, -1, 10**6])
def test_21_table_padding_is_never_followed(filler):
    check(
        MIXED,
        block_tables=[[row] * 2 + [10 + row] * 4 + [filler] * 3 for row in range(4)],
        block_size=24,
        num_blocks=20,
    )
    step = step_of(random_problem([1], [9], AttentionSpec()))
    meta = AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=1,
        seq_lens=[9],
        block_tables=torch.tensor([[0, 1, 99]]),
    )
    layer = new_layer(4, 16, num_kv_heads=2)
    with pytest.raises(InvalidInputError, match="block_tables"):
        layer.forward(step.query.cpu(), None, None, step.kv_cache.cpu(), meta)


def test_22_two_tokens_in_one_slot_are_refused_and_overlapping_copies_defined():
    planes = torch.zeros(2, 3, 4, 1, 8)
    rows = torch.ones(2, 1, 8)
    with pytest.raises(InvalidInputError, match="several tokens"):
        write_kv_(KVCache(*planes), rows, rows, torch.tensor([5, 5]))
    ids = torch.arange(4.0).repeat(2, 1).reshape(2, 4, 1, 1, 1).clone()
    TorchSDPABackend.copy_blocks([ids], {0: [1], 1: [2], 2: [3]})
    assert ids[0].flatten().tolist() == [0, 0, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "x"), [(torch.float32, 4), (torch.bfloat16, 8), (torch.float8_e5m2, 16)]
)
def test_23_the_packed_width_follows_the_dtype(dtype, x):
    assert pack_keys(torch.zeros(2, 4, 1, 48, dtype=dtype)).shape[-1] == x
    with pytest.raises(InvalidInputError, match="head_size"):
        pack_keys(torch.zeros(2, 4, 1, x + 1, dtype=dtype))
    check(MIXED, head_dim=24)
    check(MIXED, head_dim=33)


def test_24_more_slots_than_int32_counts_are_refused():
    """Element offsets are torch's, in int64; slots are what is limited."""
    plane = torch.empty(2**28, 16, 1, 1, device="meta")
    with pytest.raises(InvalidInputError, match="int32"):
        write_kv_(KVCache(plane, plane), plane[0, :1], plane[0, :1], torch.tensor([0]))


def test_25_int32_and_int64_are_both_taken():
    problem = random_problem(*MIXED, AttentionSpec())
    want = forward(problem)
    for dtype in (torch.int32, torch.int64):
        query, key, value, kv_cache, meta = step_of(problem)
        names = ("slot_mapping", "seq_lens_tensor", "block_tables", "query_start_loc")
        fields = meta.asdict_zerocopy()
        meta = type(meta)(**fields | {name: fields[name].to(dtype) for name in names})
        assert torch.equal(layer_of(problem).forward(query, key, value, kv_cache, meta), want)


def test_26_strided_caches_and_rows_are_right():
    problem = random_problem(*MIXED, AttentionSpec())
    query, key, value, kv_cache, meta = step_of(problem)
    layers = kv_cache.new_zeros(2, 3, *kv_cache.shape[1:])
    layers[:, 1] = kv_cache
    fused = torch.cat([query, key, value], dim=1)  # as a fused projection gives them
    rows = fused.split([4, 2, 2], dim=1)
    out = layer_of(problem).forward(*rows, layers[:, 1], meta)
    assert_attention_close(out, None, problem)
    assert not layers[:, [0, 2]].any()


def test_27_swap_copies_and_takes_dicts_and_tables():
    source = normal(0, 2, 4, 2, 1, 8)
    before = source.clone()
    table = torch.tensor([[1, 0], [3, 2]])
    for mapping in ({1: 0, 3: 2}, table, table.int()):
        target = torch.zeros_like(source)
        TorchSDPABackend.swap_blocks(source, target, mapping)
        assert torch.equal(target[:, [0, 2]], source[:, [1, 3]])
        assert torch.equal(source, before)


# Scale, dtype, features


@pytest.mark.parametrize("phase", PHASES)
def test_28_the_scale_is_honoured_in_every_phase(phase):
    check(PHASES[phase], AttentionSpec(scale=0.9))
    check(PHASES[phase], AttentionSpec(scale=0.05, sliding_window=4))


def test_29_unknown_caches_are_refused_and_chunking_changes_nothing():
    for dtype in ("nvfp4", "int4", torch.float8_e5m2):
        with pytest.raises(UnsupportedError, match="kv_cache_dtype"):
            new_layer(4, 16, kv_cache_dtype=dtype)
    problem = random_problem([16], [16], AttentionSpec(), poison=None)
    parts = [
        problem.replace(query=problem.query[end - 4 : end], query_lens=[4], seq_lens=[end])
        for end in (4, 8, 12, 16)
    ]
    got = torch.cat([forward(part) for part in parts])
    torch.testing.assert_close(got, forward(problem), **TIGHT)


def test_30_a_soft_cap_is_never_ignored_and_zero_is_no_off():
    with pytest.raises(InvalidInputError, match="logits_soft_cap"):
        new_layer(4, 16, logits_soft_cap=0)
    check(MIXED, AttentionSpec(logits_soft_cap=0.5))


def test_31_scale_then_cap_then_alibi_then_mask():
    spec = {"scale": 0.7, "logits_soft_cap": 0.8, "alibi_slopes": SIGNED, "sliding_window": 6}
    check(MIXED, AttentionSpec(**spec))


FEATURES = {
    "scale": 0.9,
    "sliding_window": 4,
    "logits_soft_cap": 0.5,
    "alibi_slopes": SIGNED,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("feature", FEATURES)
def test_32_every_feature_changes_every_phase(phase, feature):
    plain = random_problem(*PHASES[phase], AttentionSpec(), poison=None)
    changed = plain.replace(spec=AttentionSpec(**{feature: FEATURES[feature]}))
    out = forward(changed)
    assert (out - forward(plain)).abs().max() > 1e-2
    assert_attention_close(out, None, changed)


@pytest.mark.usefixtures("on_cpu")
def test_33_tables_too_narrow_for_the_context_are_refused():
    problem = random_problem([3], [19], AttentionSpec())
    query, key, value, kv_cache, meta = step_of(problem)
    fields = meta.asdict_zerocopy() | {"block_tables": meta.block_tables[:, :3]}
    with pytest.raises(InvalidInputError, match="seq_lens"):
        layer_of(problem).forward(query, key, value, kv_cache, type(meta)(**fields))


@pytest.mark.usefixtures("on_cpu")
def test_34_queries_and_keys_have_their_own_lengths():
    meta = AttentionMetadata.from_lists([3, 1], [8, 4], [[0, 1, 2], [3, 4]], block_size=4)
    assert meta.get_seq_lens("decoder") == ([3, 1], [11, 5])
    check(([3, 1], [11, 5]))


# Structure


def test_35_metadata_is_left_alone_and_splits_are_computed_anew():
    meta = AttentionMetadata.from_lists([3, 1], [0, 4], [[0], [1, 2]], block_size=4)
    assert meta.prefill_metadata is not meta.prefill_metadata
    before = dict(vars(meta))
    layer = new_layer(2, 8, alibi_slopes=[0.5, 0.25])
    layer.forward(*normal(0, 3, 4, 2, 8), normal(1, 2, 3, 4, 2, 8), meta)
    assert vars(meta).keys() == before.keys()
    assert all(vars(meta)[name] is value for name, value in before.items())


def test_36_encoders_leave_the_cache_and_keep_their_own_lengths():
    layer = new_layer(2, 8)
    kv_cache = torch.zeros(2, 4, 4, 2, 8)
    slots = torch.arange(5)
    meta = prompts([2, 3], slot_mapping=slots, encoder_seq_lens=[4, 3])
    layer.forward(*normal(0, 3, 5, 2, 8), kv_cache, meta, attn_type="encoder_only")
    own = normal(1, 3, 7, 2, 8)
    out = layer.forward(*own, kv_cache, meta, attn_type="encoder")
    assert_close(out, dense(*own, [4, 3], [4, 3], spec_of(layer, "encoder")), **TIGHT)
    assert not kv_cache.any()
    assert meta.prefill_metadata.num_encoder_tokens == meta.num_encoder_tokens == 7


def test_37_nothing_is_warned_away():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(MIXED, AttentionSpec(logits_soft_cap=1.0, alibi_slopes=SIGNED, sliding_window=6))
        for options in ({"kv_cache_dtype": "nvfp4"}, {"blocksparse_params": {}}):
            with pytest.raises(UnsupportedError):
                new_layer(4, 16, **options)


def test_38_sequences_of_like_lengths_are_one_kernel_call():
    problem = random_problem([1] * 64, [33] * 64, AttentionSpec())
    with Calls() as calls:
        forward(problem)
    assert len(calls.seen) == 1


@of_sdpa
def test_39_grouped_keys_are_not_repeated():
    problem = random_problem([1, 1], [33, 33], AttentionSpec(), num_heads=8, num_kv_heads=2)
    with Calls() as calls:
        forward(problem)
    for args, _ in calls.seen:
        assert args[1].shape[1] == args[2].shape[1] == 2


def test_40_the_oracle_is_plain_float64_arithmetic():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 5, 1, 8))
    got, _ = reference_attention(query, key[None], value[None], [[0]], [5], [0, 5], AttentionSpec())
    weights = np.exp(query[:, 0] @ key[:, 0].T / np.sqrt(8)) * np.tri(5)
    want = weights @ value[:, 0] / weights.sum(1, keepdims=True)
    assert got.dtype == np.float64
    np.testing.assert_allclose(got[:, 0], want, rtol=1e-13)


def test_all_forty_are_here():
    numbers = {name[5:7] for name in globals() if name.startswith("test_") and name[5:7].isdigit()}
    assert sorted(numbers) == [f"{n:02}" for n in range(1, 41)]
