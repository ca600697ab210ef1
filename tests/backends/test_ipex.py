"""The ipex backend on tensors: what its operators get wrong is right, or refused with the reason.

`test_ipex_traps` and `test_ipex_mask_traps` show each of these going wrong without the backend.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("intel_extension_for_pytorch")

from cases import problems_for
from hypothesis import given, reject
from hypothesis import strategies as st
from pagedattn_interop import to_torch
from tensors import interleaved, tensors
from torch_layers import step_of

from pagedattn import AttentionSpec, KVCache, UnsupportedError
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.strategies import BUCKETS, any_phase, options_table
from pagedattn_torch import (
    IpexAttnBackend,
    IpexAttnBackendImpl,
    empty_kv_cache,
    explain,
    paged_attention,
)

BF16, F32 = ml_dtypes.bfloat16, np.float32
LOGICAL, BY_HEAD, SLOTS_LAST = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 1, 3, 4, 2)


def tensors_of(problem):
    return tensors((jnp.asarray(problem.query), cache_of(problem)))


def check(problem, layout=lambda cache: cache):
    """Runs a problem with its cache in some layout; refusals end the test."""
    query, cache = tensors_of(problem)
    arrays = to_torch(jax.tree.map(jnp.asarray, dict(problem.arrays)))
    batch = batch_of(problem)
    out = paged_attention(query, layout(cache), batch, problem.spec, backend="ipex", **arrays)
    assert_attention_close(out, None, problem, name="ipex")
    return out


def nondecreasing_starts(*order):
    """A layout by `empty_kv_cache`, NaN in all that is not copied."""

    def place(cache):
        held = empty_kv_cache((2, *cache.key.shape), order, dtype=cache.key.dtype).fill_(torch.nan)
        held[0], held[1] = cache.key, cache.value
        return KVCache(held[0], held[1])

    return place


def one_layer(cache):
    pool = torch.full((2, 3, *cache.key.shape), torch.nan, dtype=cache.key.dtype)
    pool[0, 1], pool[1, 1] = cache.key, cache.value
    return KVCache(pool[0, 1], pool[1, 1])


def spaced(cache):
    """Neither tokens nor elements lie side by side."""
    pools = (
        torch.full((*x.shape[:3], x.shape[3], 2), torch.nan).to(x.dtype) for x in halves(cache)
    )
    pools = [pool[..., 0].copy_(x) for pool, x in zip(pools, halves(cache), strict=True)]
    return KVCache(*pools)


def halves(cache):
    return cache.key, cache.value


LAYOUTS = {
    "logical": nondecreasing_starts(*LOGICAL),
    "heads before slots": nondecreasing_starts(*BY_HEAD),
    "slots last": nondecreasing_starts(*SLOTS_LAST),
    "slots before blocks": nondecreasing_starts(0, 2, 1, 3, 4),
    "one of three layers": one_layer,
    "keys and values by block": interleaved,
    "with gaps": spaced,
    "values unlike keys": lambda cache: KVCache(
        cache.key, nondecreasing_starts(*BY_HEAD)(cache).value
    ),
    "keys unlike values": lambda cache: KVCache(
        nondecreasing_starts(*BY_HEAD)(cache).key, cache.value
    ),
}
PHASES = {
    "decode": ([1, 1, 0, 1, 1], [300, 7, 9, 129, 1]),
    "prefill": ([40, 7, 129], [40, 7, 129]),
    "mixed": ([3, 1, 0, 40, 1], [300, 7, 9, 40, 129]),
}
SPECS = {
    "plain": AttentionSpec(),
    "window": AttentionSpec(sliding_window=20),
    "window, cap": AttentionSpec(sliding_window=33, logits_soft_cap=1.5),
    "not causal": AttentionSpec(causal=False, sliding_window=20),
}


@given(problem=problems_for("ipex", any_phase))
def test_matches_the_oracle_or_is_refused(problem):
    try:
        check(problem)
    except UnsupportedError:
        reject()  # which calls those are, the table below says


@pytest.mark.parametrize("name", options_table(4))
@pytest.mark.parametrize("longest", [1, 4])
@pytest.mark.parametrize("return_lse", [False, True])
def test_refuses_these_and_no_others(name, longest, return_lse):
    spec, names, cache = options_table(4)[name]
    cache = dict(cache or {})
    problem = random_problem([1, 1], [9, 4], spec, max_query_len=longest, arrays=names, **cache)
    options = jax.tree.map(torch.from_numpy, dict(problem.arrays))
    options["return_lse"] = return_lse
    reasons = explain(*tensors_of(problem), batch_of(problem), spec, **options)["ipex"]
    words = ["alibi_slopes"] * (spec.alibi_slopes is not None and longest > 1)
    words += ["sliding_window=1"] * (spec.sliding_window == 1 and longest > 1)
    names = (*names, *(name for name in cache if name != "latent"))
    if names or return_lse:
        words = [*names, *["return_lse"] * return_lse]  # unknown to it: it is asked nothing more
    assert sorted(reason.split(":")[0] for reason in reasons) == sorted(words)


def test_other_dtypes_and_devices_are_refused():
    problem = random_problem([1], [9], AttentionSpec())
    query, cache = tensors_of(problem)
    batch = batch_of(problem)
    wide = query.double(), KVCache(cache.key.double(), cache.value.double())
    with pytest.raises(UnsupportedError, match="float64"):
        paged_attention(*wide, batch, backend="ipex")
    meta = query.to("meta"), KVCache(*(half.to("meta") for half in halves(cache)))
    assert "the query lies on meta" in " ".join(explain(*meta, batch)["ipex"])


@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 24, 48, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", SPECS)
def test_any_block_size(block_size, phase, name):
    check(random_problem(*PHASES[phase], SPECS[name], block_size=block_size, dtype=F32))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("block_size", "dtype"), [(16, F32), (24, BF16), (3, F32)])
def test_any_layout(layout, phase, name, block_size, dtype):
    problem = random_problem(*PHASES[phase], SPECS[name], block_size=block_size, dtype=dtype)
    check(problem, LAYOUTS[layout])


@pytest.mark.parametrize("phase", PHASES)
def test_a_layer_on_a_cache_in_the_order_that_it_asks_for(phase):
    problem = random_problem(*PHASES[phase], AttentionSpec(), block_size=16)
    step, order = step_of(problem), IpexAttnBackend.get_kv_cache_stride_order("cpu")
    held = empty_kv_cache(step.kv_cache.shape, order, dtype=torch.float32).copy_(step.kv_cache)
    assert held[0].transpose(1, 2).is_contiguous()
    out = IpexAttnBackendImpl(4, 16, num_kv_heads=2).forward(*step[:3], held, step.attn_metadata)
    assert_attention_close(out, None, problem)


@pytest.mark.parametrize("count", [4, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("dummies", ["none", "in front", "behind", "between"])
def test_sequences_that_share_their_first_block(count, cap, dummies):
    """Enough heads that the operator would take its way for beams; dummies are empty."""
    lens = [40, 33, 40, 20, 17, 48, 40, 21, 30][:count]
    tables = [[0, 2 * s + 1, 2 * s + 2] for s in range(count)]
    at = {"none": [], "in front": [0, 0], "behind": [count], "between": [1, 3]}[dummies]
    for place in at:
        lens.insert(place, 0)
        tables.insert(place, [0, 0, 0])
    problem = random_problem(
        [1] * len(lens),
        lens,
        AttentionSpec(logits_soft_cap=cap),
        num_heads=8 * torch.get_num_threads(),
        num_kv_heads=1,
        block_size=16,
        num_blocks=20,
        block_tables=tables,
    )
    check(problem)


@pytest.mark.parametrize("queries", [[0, 0], [1, 1], [1, 0], [3, 2], [3, 0], [1, 3]])
@pytest.mark.parametrize("keys", [[0, 0], [0, 5], [5, 0]])
@pytest.mark.parametrize("causal", [True, False])
def test_sequences_without_keys_or_queries(queries, keys, causal):
    check(random_problem(queries, keys, AttentionSpec(causal=causal), pad_tokens=9))


@pytest.mark.parametrize("window", [1, 4, 17, 200])
@pytest.mark.parametrize("queries", [1, 5])
def test_very_negative_logits_in_a_window(window, queries):
    """All are -400: a maximum that starts at 0 would leave nothing of them."""
    spec = AttentionSpec(sliding_window=window + (queries > 1))
    problem = random_problem([queries], [300], spec, num_heads=1, num_kv_heads=1, block_size=16)
    key = np.where(np.isnan(problem.key_cache), np.nan, 1).astype(np.float32)
    problem = problem.replace(query=np.full_like(problem.query, -100), key_cache=key)
    assert check(problem).abs().max() > 0.1


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("window", [2, 16, 17, 100])
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("lens", [([1, 1], [300, 129]), ([5, 40, 1], [300, 45, 129])])
@pytest.mark.parametrize("causal", [True, False])
def test_what_lies_behind_every_window_is_never_touched(poison, window, dtype, lens, causal):
    spec = AttentionSpec(sliding_window=window, causal=causal)
    check(random_problem(*lens, spec, poison=poison, dtype=dtype, block_size=16))


@pytest.mark.parametrize("window", [None, 2, 5, 9])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "lens", [([10], [3]), ([10, 1, 7], [3, 0, 40]), ([1, 1], [9, 0]), ([5, 600, 1], [700, 5, 40])]
)
def test_cross_attention(window, causal, lens):
    """With more queries than keys, whose first queries stand before key 0."""
    check(random_problem(*lens, AttentionSpec(causal=causal, sliding_window=window)))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_alibi_of_a_decode_at_100k_tokens(dtype):
    """Keys of zero: the weights are those of the slopes alone."""
    spec = AttentionSpec(alibi_slopes=(1e-4, -1.0, 0.5, 2e-5))
    problem = random_problem([1], [100_003], spec, num_kv_heads=1, block_size=128, dtype=dtype)
    check(problem.replace(key_cache=np.zeros_like(problem.key_cache)))


@pytest.mark.parametrize("head_dim", [1, 8, 33, 80, 192, 256, 576])
def test_any_head_dim(head_dim):
    for phase in PHASES.values():
        check(random_problem(*phase, AttentionSpec(), head_dim=head_dim, block_size=16))


@given(problem=problems_for("ipex", bucket=BUCKETS[0], dtype=F32), data=st.data())
def test_strided_queries(problem, data):
    query, cache = tensors_of(problem)
    fused = torch.cat([query, query], dim=data.draw(st.sampled_from([1, 2])))
    query = fused[:, : query.shape[1], : query.shape[2]]
    batch = batch_of(problem)
    if problem.arrays or explain(query, cache, batch, problem.spec)["ipex"]:
        reject()
    out = paged_attention(query, cache, batch, problem.spec, backend="ipex")
    assert_attention_close(out, None, problem)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", SPECS)
def test_inputs_are_left_alone(phase, name):
    problem = random_problem(*PHASES[phase], SPECS[name])
    query, cache = tensors_of(problem)
    before = [x.clone() for x in (query, *halves(cache))]
    out = paged_attention(query, cache, batch_of(problem), problem.spec, backend="ipex")
    for now, then in zip((query, *halves(cache)), before, strict=True):
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
    assert out.data_ptr() != query.data_ptr()
