"""The ipex backend's side of an XPU: operators that keep to its rules stand in for the device."""

import dataclasses
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import SIGNED
from hypothesis import given
from hypothesis import strategies as st
from layer_routes import route
from pagedattn_interop import to_torch
from torch_layers import assert_close, dense, normal, reference, spec_of, step_of
from xpu_rules import NeverWaits, stand_in_for_xpu

from pagedattn import AttentionSpec, KVCache, UnsupportedError
from pagedattn._dispatch import registry
from pagedattn._dispatch.call import call_of
from pagedattn.batch.packed import packed_batch, packed_cache
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.strategies import seeds
from pagedattn_torch import (
    IpexAttnBackend,
    IpexAttnBackendImpl,
    IpexAttnMetadata,
    empty_kv_cache,
    explain,
    paged_attention,
)
from pagedattn_torch.arrays import batch_on
from pagedattn_torch.backends import ipex

F16, BF16 = np.float16, ml_dtypes.bfloat16
LOGICAL, SLOTS_LAST = (0, 1, 2, 3, 4), (0, 1, 3, 4, 2)
ORDERS = {16: SLOTS_LAST, 32: SLOTS_LAST, 64: LOGICAL, 128: LOGICAL}
SPECS = {
    "plain": AttentionSpec(),
    "scale": AttentionSpec(scale=0.3),
    "soft cap": AttentionSpec(logits_soft_cap=1.5),
    "alibi": AttentionSpec(alibi_slopes=SIGNED),
    "cap, alibi": AttentionSpec(logits_soft_cap=1.5, alibi_slopes=SIGNED),
    "not causal": AttentionSpec(causal=False),
    "window": AttentionSpec(sliding_window=20),
    "window 1": AttentionSpec(sliding_window=1),
    "window, cap": AttentionSpec(sliding_window=70, logits_soft_cap=1.5),
    "two-sided window": AttentionSpec(causal=False, sliding_window=20),
    "all": AttentionSpec(scale=0.4, sliding_window=9, logits_soft_cap=2.0, alibi_slopes=SIGNED),
}
ONE_QUERY = {name: spec for name, spec in SPECS.items() if spec.sliding_window is None}
DECODE = ([1, 1, 0, 1, 1, 0], [300, 7, 9, 129, 1, 0])
PREFILL = ([40, 7, 129], [40, 7, 129])
MIXED = ([3, 1, 0, 80, 1, 0], [300, 7, 9, 200, 129, 0])


def run(query, cache, batch, spec):
    """The backend, without the checks that come before it."""
    return ipex.run(call_of(query, cache, batch, spec), query, cache, batch)


@pytest.fixture
def xpu(monkeypatch, on_cpu):
    registry.tried.cache_clear()
    yield stand_in_for_xpu(monkeypatch)
    registry.tried.cache_clear()


def problem_of(lens, spec, block_size, dtype=F16, **sizes):
    """What no query sees is 0, not NaN, in blocks that a sequence owns: see the shortcomings."""
    sizes = {"pad_tokens": sum(lens[0]) + 2} | sizes
    problem = random_problem(*lens, spec, block_size=block_size, dtype=dtype, **sizes)
    planes = {name: getattr(problem, name).copy() for name in ("key_cache", "value_cache")}
    for row, length in zip(problem.block_tables, problem.seq_lens, strict=True):
        owned = np.asarray(row[: -(-length // block_size)], int)
        for plane in planes.values():
            plane[owned] = np.where(np.isnan(plane[owned]), 0, plane[owned])
    return problem.replace(**planes)


def inputs(problem, order):
    """query, cache and batch as tensors, the cache in some order of memory."""
    query, cache = to_torch((jnp.asarray(problem.query), cache_of(problem)), copy=True)
    held = empty_kv_cache((2, *cache.key.shape), order, dtype=cache.key.dtype)
    held[0], held[1] = cache.key, cache.value
    return query, KVCache(held[0], held[1]), batch_on(batch_of(problem), None)


def check(xpu, problem, order, kernel):
    """Right, by that operator, on the cache's own memory, and without waiting."""
    query, cache, batch = inputs(problem, order)
    paged_attention(query, cache, batch, problem.spec, backend="ipex")  # slopes are copied once
    xpu.calls.clear()
    with NeverWaits():
        out, lse = run(query, cache, batch, problem.spec)
    assert lse is None
    assert_attention_close(out, None, problem, name=f"ipex, {kernel}")
    assert xpu.calls == [(kernel, cache.key.data_ptr(), cache.value.data_ptr())]


@pytest.mark.parametrize("name", ONE_QUERY)
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("lens", [DECODE, ([1], [1]), ([1, 1], [0, 5]), ([1], [600])])
def test_decode_with_slots_last(xpu, name, block_size, dtype, lens):
    problem = problem_of(lens, ONE_QUERY[name], block_size, dtype, max_query_len=1)
    check(xpu, problem, SLOTS_LAST, "decode")


@pytest.mark.parametrize("name", [n for n in SPECS if SPECS[n].causal or "alibi" not in n])
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("lens", [DECODE, PREFILL, MIXED])
def test_any_queries_in_the_logical_order(xpu, name, block_size, dtype, lens):
    problem = problem_of(lens, SPECS[name], block_size, dtype)
    check(xpu, problem, LOGICAL, "packed")


# Causal and without a window that hides keys it is a shortcoming: see below.
WINDOWS = [*((True, w) for w in (2, 5, 9)), *((False, w) for w in (None, 2, 5, 9, 130))]


@pytest.mark.parametrize(("causal", "window"), WINDOWS)
@pytest.mark.parametrize("lens", [([10], [3]), ([10, 1, 7], [3, 0, 40]), ([300], [130])])
def test_more_queries_than_keys(xpu, window, lens, causal):
    spec = AttentionSpec(causal=causal, sliding_window=window)
    check(xpu, problem_of(lens, spec, 64), LOGICAL, "packed")


@pytest.mark.parametrize("head_dim", [8, 64, 80, 256])
def test_head_dims(xpu, head_dim):
    sizes = {"head_dim": head_dim, "max_query_len": 1}
    check(xpu, problem_of(DECODE, SPECS["plain"], 16, **sizes), SLOTS_LAST, "decode")
    check(xpu, problem_of(MIXED, SPECS["plain"], 64, head_dim=head_dim), LOGICAL, "packed")


@pytest.mark.parametrize(
    ("block_size", "lens", "kernel"), [(16, DECODE, "decode"), (64, MIXED, "packed")]
)
@given(seed=seeds(), heads=st.sampled_from([(1, 1), (4, 1), (4, 4), (6, 3)]))
def test_any_heads(xpu, block_size, lens, kernel, seed, heads):
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1], "seed": seed}
    problem = problem_of(lens, AttentionSpec(), block_size, **sizes)
    check(xpu, problem, ORDERS[block_size], kernel)


def rows_of(tokens):
    return [normal(i, tokens, n, 16, dtype=torch.float16) for i, n in enumerate((4, 2, 2))]


PACKED_LENS = [[5], [40, 7, 1], [0, 64, 65, 200]]


@pytest.mark.parametrize("name", [n for n in SPECS if SPECS[n].causal or "alibi" not in n])
@pytest.mark.parametrize("lens", PACKED_LENS)
def test_packed_keys_are_put_in_pages(xpu, name, lens):
    """Encoders, profiling runs and prompts without tables: by that operator too."""
    rows = rows_of(sum(lens))
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    batch = packed_batch(sum(lens), starts, starts, max(lens), max(lens))
    call = rows[0], packed_cache(*rows[1:]), batch, SPECS[name]
    paged_attention(*call, backend="ipex")  # slopes are copied once
    xpu.calls.clear()
    with NeverWaits():
        out, _ = run(*call)
    assert_close(out, dense(*rows, lens, lens, SPECS[name]), atol=4e-3, rtol=4e-3)
    assert [operator for operator, *_ in xpu.calls] == ["packed"]


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_only"])
@pytest.mark.parametrize("window", [None, 5])
def test_layers_of_alibi_models_run(xpu, kind, window):
    """Causal prompts by the extension, what looks both ways by SDPA."""
    lens = [40, 7, 65]
    rows = rows_of(112)
    layer = IpexAttnBackendImpl(4, 16, num_kv_heads=2, alibi_slopes=SIGNED, sliding_window=window)
    own = {"encoder_seq_lens": lens} if kind == "encoder" else {"seq_lens": lens}
    tokens = 0 if kind == "encoder" else 112
    counts = {"num_prefills": 3, "num_prefill_tokens": tokens, "num_decode_tokens": 0}
    meta = IpexAttnMetadata(**counts, **own)
    out = layer.forward(*rows, None, meta, attn_type=kind)
    want = dense(*rows, lens, lens, spec_of(layer, kind))
    assert_close(out, want, atol=4e-3, rtol=4e-3)
    assert len(xpu.calls) == (kind == "decoder")


OTHER_ORDERS = [(24, SLOTS_LAST), (16, LOGICAL), (32, LOGICAL), (8, (0, 1, 3, 2, 4)),
                (64, SLOTS_LAST), (64, (0, 1, 3, 2, 4))]  # fmt: skip


@pytest.mark.parametrize("name", [n for n in SPECS if SPECS[n].causal or "alibi" not in n])
@pytest.mark.parametrize(("block_size", "order"), OTHER_ORDERS)
@pytest.mark.parametrize("lens", [DECODE, PREFILL, MIXED, ([10, 1, 7], [13, 0, 40])])
def test_other_layouts_are_copied_to_pages(xpu, name, block_size, order, lens):
    """With NaN in all that no query sees."""
    sizes = {"block_size": block_size, "dtype": F16, "pad_tokens": sum(lens[0]) + 2}
    problem = random_problem(*lens, SPECS[name], **sizes)
    query, cache, batch = inputs(problem, order)
    paged_attention(query, cache, batch, problem.spec, backend="ipex")  # slopes are copied once
    xpu.calls.clear()
    with NeverWaits():
        out, _ = run(query, cache, batch, problem.spec)
    assert_attention_close(out, None, problem, name="ipex, copied")
    assert [operator for operator, *_ in xpu.calls] == ["packed"]


@pytest.mark.parametrize("block_size", [16, 32, 64])
@pytest.mark.parametrize("name", ["plain", "window", "alibi"])
@given(seed=seeds(), lens=st.lists(st.integers(1, 70), min_size=1, max_size=3))
def test_an_engine_s_own_cache_from_prompt_to_decode(xpu, block_size, name, seed, lens):
    """In the shape and order that the backend itself gives: prompts, chunks, then decodes."""
    spec = AttentionSpec() if name == "plain" else SPECS[name]
    ends = [n + 9 for n in lens]
    problem = random_problem(ends, ends, spec, block_size=block_size, dtype=F16, seed=seed)
    query, key, value, _, _ = step_of(problem)
    shape = IpexAttnBackend.get_kv_cache_shape(len(problem.key_cache), block_size, 2, 16)
    order = IpexAttnBackend.get_kv_cache_stride_order("xpu")
    unused = torch.nan if block_size < 64 else 0.0  # in place NaN spreads: see the shortcomings
    kv_cache = empty_kv_cache(shape, order, dtype=torch.float16).fill_(unused)
    layer = IpexAttnBackendImpl(4, 16, None, 2, spec.alibi_slopes, spec.sliding_window)
    starts, want = problem.query_start_loc, reference(problem)
    cuts = [[0] * len(lens), lens, [n + 8 for n in lens], ends]
    for first, last in itertools.pairwise(cuts):
        rows = np.concatenate([np.arange(s + a, s + b) for s, a, b in
                               zip(starts, first, last, strict=False)])  # fmt: skip
        counts = [b - a for a, b in zip(first, last, strict=True)]
        meta = IpexAttnMetadata.from_lists(
            counts, first, problem.block_tables, block_size=block_size
        )
        out = layer.forward(query[rows], key[rows], value[rows], kv_cache, meta)
        assert_close(out, want[rows], atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize("block_size", [16, 64])
def test_cross_attention_of_an_engine_s_own_cache(xpu, block_size):
    one = route("cross", IpexAttnBackendImpl, torch.float16, block_size)
    out = one.layer.forward(*one.rows, one.kv_cache, one.meta, attn_type=one.kind)
    assert_close(out, one.want, atol=4e-3, rtol=4e-3)


@pytest.mark.parametrize(("block_size", "order"), [(16, SLOTS_LAST), (64, LOGICAL), (16, LOGICAL)])
def test_what_is_not_chosen_says_why(xpu, block_size, order):
    problem = problem_of(DECODE, AttentionSpec(), block_size, max_query_len=1)
    answers = explain(*inputs(problem, order), problem.spec)
    assert answers["ipex"] == []
    assert answers.choice == "sdpa"
    reasons = " ".join(answers.passed_over["ipex"])
    assert "never been run" in reasons
    assert ("copies the keys" in reasons) == ((block_size, order) == (16, LOGICAL))


REFUSED = {
    "float32": (DECODE, 16, SLOTS_LAST, {"dtype": np.float32}, {}),
    "head_dim": (MIXED, 16, SLOTS_LAST, {"head_dim": 520}, {}),
    "alibi_slopes": (MIXED, 64, LOGICAL, {}, {"alibi_slopes": SIGNED, "causal": False}),
}


@pytest.mark.parametrize("word", REFUSED)
def test_refused_by_name(xpu, word):
    lens, block_size, order, sizes, fields = REFUSED[word]
    problem = problem_of(lens, AttentionSpec(**fields), block_size, **sizes)
    with pytest.raises(UnsupportedError, match=word):
        paged_attention(*inputs(problem, order), problem.spec, backend="ipex")
    assert xpu.calls == []


def test_lse_is_refused(xpu):
    problem = problem_of(MIXED, AttentionSpec(), 64)
    with pytest.raises(UnsupportedError, match="return_lse"):
        paged_attention(*inputs(problem, LOGICAL), backend="ipex", return_lse=True)


def test_an_engine_s_default_order_is_the_logical_one():
    assert IpexAttnBackend.get_kv_cache_stride_order("xpu") == LOGICAL


@pytest.mark.parametrize(("block_size", "lens"), [(16, DECODE), (64, MIXED), (24, MIXED)])
@pytest.mark.parametrize(
    "changes",
    [
        {"seq_lens": [2**31 - 1] * 6},
        {"seq_lens": [-5, 2**30, -1, 7, 400, -(2**31)]},
        {"block_tables": [[2**31 - 1] * 99] * 6},
        {"block_tables": [[-1] * 99] * 6},
        {"query_start_loc": [0, 2**31 - 1, 3, -1, 5, 2**30, 6]},
        {"query_start_loc": [-9, -3, 4, 4, 1000, 1000, 1000]},
    ],
)
def test_garbage_leads_nowhere(xpu, block_size, lens, changes):
    """Values on a device are not checked: the operators must be given none that lead outside."""
    problem = problem_of(lens, AttentionSpec(), block_size)
    query, cache, batch = inputs(problem, ORDERS.get(block_size, LOGICAL))
    arrays = {name: torch.tensor(values, dtype=torch.int32) for name, values in changes.items()}
    if "block_tables" in arrays:
        arrays["block_tables"] = arrays["block_tables"][:, : batch.max_blocks].contiguous()
    batch = dataclasses.replace(batch, **arrays)
    with NeverWaits():
        out, _ = run(query, cache, batch, problem.spec)
    assert out.shape == query.shape


def shortcoming(reason):
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"the operator: {reason}")


@shortcoming("a weight of 0 times a value of NaN, in the last block")
def test_nan_after_a_sequence_in_decode(xpu):
    problem = random_problem([1], [9], AttentionSpec(), block_size=16, dtype=F16)
    check(xpu, problem, SLOTS_LAST, "decode")


@shortcoming("a weight of 0 times a value of NaN, in a page partly behind the window")
def test_nan_behind_a_window(xpu):
    spec = AttentionSpec(sliding_window=9)
    problem = random_problem([1], [60], spec, block_size=64, dtype=F16)
    check(xpu, problem, LOGICAL, "packed")


@shortcoming("positions before key 0 are compared without a sign")
def test_causal_with_more_queries_than_keys(xpu):
    check(xpu, problem_of(([10], [3]), AttentionSpec(), 64), LOGICAL, "packed")


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("lens", [DECODE, MIXED])
def test_sdpa_reads_nothing_on_another_device(name, lens, return_lse):
    """Tensors without values: whatever looked at one would raise."""
    problem = random_problem(*lens, SPECS[name], pad_tokens=sum(lens[0]) + 2, dtype=BF16)
    query, cache, batch = inputs(problem, LOGICAL)
    cache = KVCache(cache.key.to("meta"), cache.value.to("meta"))
    result = paged_attention(
        query.to("meta"), cache, batch_on(batch, "meta"), problem.spec, return_lse=return_lse
    )
    out, lse = result if return_lse else (result, None)
    assert (out.shape, out.dtype, out.device.type) == (query.shape, query.dtype, "meta")
    assert lse is None or (lse.shape, lse.dtype) == (query.shape[:2], torch.float32)
