"""What must hold of attention whatever the batch, for every backend, eagerly and in jit."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import (
    REFUSING,
    SPECS,
    attend_with_any_lse,
    lacks,
    may_refuse,
    mixed,
    problems_for,
    replace_spec,
    rows_of,
    run,
    supported,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import (
    AttentionSpec,
    KVCache,
    UnsupportedError,
    append_tokens,
    batch_from_pool,
    copy_blocks,
    drop_blocks,
    explain,
    fork,
    hold_blocks,
    init_block_pool,
    init_kv_cache,
    make_batch,
    merge_states,
    next_batches,
    paged_attention,
    ragged_attention,
    release,
    release_behind,
    share_blocks,
    swap_out,
    write_kv,
)
from pagedattn._dispatch.registry import wrong_device
from pagedattn.testing import (
    assert_attention_close,
    batch_of,
    cache_of,
    check_backend,
    expect,
    random_problem,
    reference_attention,
)
from pagedattn.testing.features import OPTIONS, PHASES
from pagedattn.testing.harness import Cell, cell_problem
from pagedattn.testing.strategies import (
    BUCKETS,
    GARBAGE,
    POISONS,
    any_phase,
    dtypes,
    options_table,
    problems,
    seeds,
)

BUCKET = BUCKETS[0]
FLOAT32 = {"bucket": BUCKET, "dtype": np.float32}
PLAIN = AttentionSpec()


def assert_same(got, want, name):
    """Equal to float32 rounding; both are also held to the oracle elsewhere."""
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5, err_msg=f"{name}: out")
    if got[1] is not None:
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-5, err_msg=f"{name}: lse")


@given(data=st.data())
@settings(settings(), max_examples=settings().max_examples // 2)  # each is a program
def test_matches_the_oracle(backend, mode, data):
    """Any spec, dtype and phase, poison wherever nobody may look."""
    problem = data.draw(problems_for(backend, any_phase))
    assert_attention_close(*run(problem, backend, mode), problem, name=backend)


@pytest.mark.parametrize("name", options_table(BUCKET.num_heads))
@given(data=st.data())
def test_all_options_match_the_oracle(backend, name, data):
    if lacking := lacks(backend, name):
        pytest.skip(f"{backend} does not have {lacking}")
    options = options_table(BUCKET.num_heads)[name]._asdict()
    problem = data.draw(problems(bucket=BUCKET, dtype=np.float32, **options))
    assert_attention_close(*run(problem, backend), problem, name=backend)


def test_every_feature_matches_or_is_refused(backend, mode):
    dtype = np.float32 if mode == "jit" else ml_dtypes.bfloat16
    cells = check_backend(backend, jit=mode == "jit", dtypes=[dtype])
    assert len(cells) == len(OPTIONS) * len(PHASES)
    refused = [cell.feature for cell in cells if cell.result != "ok"]
    options = REFUSING.get(backend, ())
    assert all(any(option in OPTIONS[name] for option in options) for name in refused)
    assert options or not refused


@given(data=st.data(), seed=seeds())
def test_relabelling_blocks(backend, data, seed):
    """Which blocks hold a sequence is of no account."""
    problem = data.draw(problems_for(backend, **FLOAT32))
    order = np.random.default_rng(seed).permutation(BUCKET.num_blocks)
    planes = {name: array[np.argsort(order)] for name, array in problem.by_slot.items()}
    known = (problem.block_tables >= 0) & (problem.block_tables < BUCKET.num_blocks)
    tables = np.where(known, order[np.where(known, problem.block_tables, 0)], -1)
    moved = problem.replace(**planes, block_tables=tables)
    assert_same(run(moved, backend), run(problem, backend), "relabelled")


def with_tokens(problem, index):
    """The problem with these tokens as its first, and NaN as the others, without parents."""
    rows = {"query": problem.query, "bias": problem.bias, "parents": problem.parents}
    rows = {name: array for name, array in rows.items() if array is not None}
    nothing = {"parents": -1}
    moved = {name: np.full_like(array, nothing.get(name, np.nan)) for name, array in rows.items()}
    for name, array in rows.items():
        moved[name][: len(index)] = array[index]
    return problem.replace(**moved)


@given(data=st.data())
def test_batch_mates(backend, data):
    """A sequence gives the same alone, with the others gone and all else NaN."""
    problem = data.draw(problems_for(backend, **FLOAT32))
    s = data.draw(st.integers(0, BUCKET.num_seqs - 1), label="sequence")
    rows = slice(*problem.query_start_loc[s : s + 2])
    lone = [[n if i == s else 0 for i, n in enumerate(problem.query_lens)]]
    lone.append([n if i == s else 0 for i, n in enumerate(problem.seq_lens)])
    moved = with_tokens(problem, np.arange(rows.start, rows.stop))
    alone = moved.replace(query_lens=lone[0], seq_lens=lone[1]).poisoned()
    got, want = run(alone, backend), run(problem, backend)
    count = rows.stop - rows.start
    assert_same(rows_of(got, slice(count)), rows_of(want, rows), "alone")
    assert not got[0][count:].any()


@given(data=st.data())
def test_order_of_sequences(backend, data):
    """Sequences may stand in any order; their rows move with them."""
    problem = data.draw(problems_for(backend, **FLOAT32))
    order = data.draw(st.permutations(range(BUCKET.num_seqs)))
    starts = problem.query_start_loc
    index = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in order])
    moved = with_tokens(problem, index).replace(
        block_tables=problem.block_tables[order],
        selection=None if problem.selection is None else problem.selection[order],
        query_lens=[problem.query_lens[s] for s in order],
        seq_lens=[problem.seq_lens[s] for s in order],
    )
    got, want = run(moved, backend), run(problem, backend)
    assert_same(rows_of(got, slice(len(index))), rows_of(want, index), "reordered")


def test_padding(backend, mode):
    """More padding of every kind, of any content, changes nothing and stays empty."""
    tight = supported(random_problem([6, 7, 1], [6, 19, 22], SPECS["all"]), backend)
    wide = random_problem(
        [6, 7, 1, 0, 0],
        [6, 19, 22, 0, 0],
        tight.spec,
        block_tables=[[*row, *[10**6] * 4] for row in [*tight.block_tables, [-5], []]],
        pad_tokens=33,
        num_blocks=len(tight.key_cache),
        max_query_len=64,
    )
    query = wide.query.copy()
    query[:14] = tight.query
    pools = {"key_cache": tight.key_cache, "value_cache": tight.value_cache}
    got = run(wide.replace(query=query, **pools), backend, mode)
    assert_same(rows_of(got, slice(14)), run(tight, backend, mode), "padded")
    assert not got[0][14:].any()
    assert got[1] is None or (got[1][14:] == -np.inf).all()


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, np.float32) for name in SPECS), ("all", ml_dtypes.bfloat16)]
)
def test_poison_changes_no_bit(backend, name, dtype, poison):
    """What nobody may see may hold anything: not even rounding tells."""
    clean = mixed(SPECS[name], poison=None, dtype=dtype)
    want, got = run(clean, backend), run(clean.poisoned(poison), backend)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize("poison", POISONS)
def test_poison_behind_every_window(backend, mode, poison):
    """Decode and chunks whose first blocks lie wholly behind the window, freed and reused."""
    spec = AttentionSpec(sliding_window=3)
    problem = random_problem([1, 2, 5], [24, 19, 21], spec, poison=poison, max_query_len=8)
    assert np.isnan(problem.key_cache).mean() > 0.5 or np.isinf(problem.key_cache).mean() > 0.5
    assert_attention_close(*run(problem, backend, mode), problem)


@pytest.mark.parametrize("entry", GARBAGE)
def test_no_entry_behind_every_window_is_followed(backend, mode, entry):
    """Blocks given back are -1 there; the blocks that ids out of range are clamped to hold NaN."""
    spec, query_lens, seq_lens = AttentionSpec(sliding_window=6), [1, 2, 5], [24, 19, 21]
    tables = np.random.default_rng(0).permutation(np.arange(1, 19)).reshape(3, 6)
    lens = {"block_tables": tables, "num_blocks": 20, "max_query_len": 8}
    problem = random_problem(query_lens, seq_lens, spec, **lens)
    assert np.isnan(problem.key_cache[[0, -1]]).all()
    first = (np.subtract(seq_lens, query_lens) - spec.sliding_window + 1) // problem.block_size
    assert (first >= 2).all()
    given_back = jnp.asarray(np.where(np.arange(6) < first[:, None], entry, tables), jnp.int32)
    batch = dataclasses.replace(batch_of(problem), block_tables=given_back)
    attend = attend_with_any_lse
    if mode == "jit":
        attend = jax.jit(attend, static_argnames=("spec", "backend"))
    got = attend(jnp.asarray(problem.query), cache_of(problem), batch, spec=spec, backend=backend)
    assert_attention_close(*got, problem)


@pytest.mark.parametrize("causal", [True, False])
def test_queries_that_see_nothing_through_a_window_wider_than_the_table(backend, mode, causal):
    """More queries than keys: the first stand at position -7, beyond a window of 5."""
    spec = AttentionSpec(causal=causal, sliding_window=5)
    problem = random_problem([10], [3], spec, max_query_len=16)
    out, lse = run(problem, backend, mode)
    assert_attention_close(out, lse, problem)
    if lse is not None:
        assert np.isneginf(lse[: 7 if causal else 3]).all()
        assert np.isfinite(lse[7 if causal else 3 :]).all()


def test_grouped_queries_are_repeated_kv_heads(backend):
    grouped = supported(mixed(SPECS["all"]), backend)
    repeated = grouped.replace(
        key_cache=np.repeat(grouped.key_cache, 2, axis=2),
        value_cache=np.repeat(grouped.value_cache, 2, axis=2),
    )
    assert_same(run(grouped, backend), run(repeated, backend), "repeated")


SAME_SPECS = [
    # a spec that does nothing, and the spec without it
    ({"sliding_window": 22}, {}),
    ({"sliding_window": 2**31 - 1}, {}),
    ({"sliding_window": 10**12}, {}),
    ({"causal": False, "sliding_window": 2**31 - 1}, {"causal": False}),
    ({"logits_soft_cap": 1e6}, {}),
    ({"alibi_slopes": (0.0,) * 4}, {}),
    ({"alibi_slopes": (-0.0,) * 4}, {}),
    ({"scale": 16**-0.5}, {}),
]


@pytest.mark.parametrize(("fields", "plain"), SAME_SPECS)
def test_specs_that_do_nothing(backend, fields, plain):
    got, want = (run(mixed(AttentionSpec(**spec)), backend) for spec in (fields, plain))
    assert_same(got, want, str(fields))


FEATURES = {
    "scale": 0.9,
    "sliding_window": 4,
    "logits_soft_cap": 0.5,
    "alibi_slopes": (0.5, 0.1, -0.2, 0.3),
    "causal": False,
}


@pytest.mark.parametrize("field", FEATURES)
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_every_feature_changes_the_result(backend, field, phase):
    """Nothing is ignored: an option that should matter does, in every phase."""
    if (field, phase) == ("causal", "decode"):
        lens = ([2, 2], [9, 17])  # one query at the end sees all keys either way
    else:
        lens = {"decode": ([1, 1], [9, 17]), "prefill": ([9, 17], [9, 17])}[phase]
    problem = random_problem(*lens, PLAIN, poison=None, pad_tokens=26, max_query_len=32)
    changed = replace_spec(problem, **{field: FEATURES[field]})
    difference = np.abs(run(changed, backend)[0] - run(problem, backend)[0])
    assert difference.max() > 1e-2


def steps(totals, cuts):
    """`(query_lens, context_lens)` of each step: sequences advance by `cuts` tokens until done."""
    done = [0] * len(totals)
    while done != list(totals):
        cut = next(cuts)
        lens = [min(n, total - d) for n, total, d in zip(cut, totals, done, strict=True)]
        yield lens, list(done)
        done = [d + n for d, n in zip(done, lens, strict=True)]


def serve(key, value, query, tables, totals, cuts, *, spec, backend, room):
    """Prefill by chunks through write_kv and paged_attention; out and lse by sequence."""
    pool = 40, 4, *key[0].shape[1:]
    cache = KVCache(jnp.full(pool, jnp.nan), jnp.full(pool, jnp.nan))
    outs = [[] for _ in totals]
    lses = [[] for _ in totals]
    for lens, context in steps(totals, cuts):
        batch = make_batch(lens, context, tables, block_size=4, pad_tokens=room, max_query_len=room)
        spans = [slice(c, c + n) for c, n in zip(context, lens, strict=True)]
        packed = [
            pad(np.concatenate([x[s][span] for s, span in enumerate(spans)]), room)
            for x in (query, key, value)
        ]
        cache = WRITE(cache, *packed[1:], batch.slot_mapping)
        out, lse = ATTEND(packed[0], cache, batch, spec, backend)
        for s, (start, stop) in enumerate(zip(*(ends(lens)), strict=True)):
            outs[s].append(np.asarray(out)[start:stop])
            if lse is not None:
                lses[s].append(np.asarray(lse)[start:stop])
    results = [[row for rows in of_sequences for row in rows] for of_sequences in (outs, lses)]
    return [np.concatenate(rows) if rows else None for rows in results]


WRITE = jax.jit(write_kv)
ATTEND = jax.jit(attend_with_any_lse, static_argnames=("spec", "backend"))


def ends(lens):
    stops = np.cumsum(lens)
    return stops - lens, stops


def pad(x, length):
    return jnp.asarray(np.pad(x, [(0, length - len(x)), *[(0, 0)] * (x.ndim - 1)]))


@pytest.mark.parametrize(
    "name", ["plain", "sliding_window", "all"]
)  # causal ones: no key is to come
@given(
    totals=st.tuples(*[st.integers(0, 12)] * 3),
    cuts=st.lists(st.tuples(*[st.integers(0, 8)] * 3).filter(any), min_size=1, max_size=6),
    seed=seeds(),
)
def test_chunking(backend, name, totals, cuts, seed):
    """One shot = any chunks = token by token = the oracle, from an all-NaN cache."""
    rng = np.random.default_rng(seed)
    tables = rng.permutation(40)[:9].reshape(3, 3)
    query, key, value = (
        [rng.standard_normal((n, heads, 16)).astype(np.float32) for n in totals]
        for heads in (4, 2, 2)
    )
    spec = supported(mixed(SPECS[name]), backend).spec
    if not sum(totals):
        return
    schedules = {
        "one shot": iter([(12, 12, 12)]),
        "chunks": chain_forever([*cuts, (1, 1, 1)]),
        "tokens": chain_forever([(1, 1, 1)]),
    }
    got = {
        kind: serve(key, value, query, tables, totals, plan, spec=spec, backend=backend, room=room)
        for (kind, plan), room in zip(schedules.items(), (36, 24, 3), strict=True)
    }
    assert_same(got["chunks"], got["one shot"], "chunks")
    assert_same(got["tokens"], got["one shot"], "tokens")
    blocks = [-(-n // 4) for n in totals]
    want = dense_reference(query, key, value, blocks, totals, spec)
    assert_same(got["one shot"], want, "oracle")


def chain_forever(cuts):
    while True:
        yield from cuts


def dense_reference(query, key, value, blocks, totals, spec):
    """The oracle over a cache whose blocks lie in order."""
    pools = []
    for x in (key, value):
        parts = [np.pad(t, [(0, -len(t) % 4), (0, 0), (0, 0)]) for t in x]
        pools.append(np.concatenate(parts).reshape(-1, 4, *x[0].shape[1:]))
    starts, stops = ends(blocks)
    tables = [range(start, stop) for start, stop in zip(starts, stops, strict=True)]
    starts = np.concatenate([[0], np.cumsum(totals)])
    return reference_attention(np.concatenate(query), *pools, tables, totals, starts, spec)


MERGEABLE = {name: SPECS[name] for name in ("plain", "logits_soft_cap", "causal=False")}


@pytest.mark.parametrize("name", MERGEABLE)
@given(splits=st.tuples(st.integers(0, 5), st.integers(0, 5)), seed=seeds())
def test_split_and_merge_is_whole(backend, name, splits, seed):
    """Attention over parts of the context and over the rest, merged in either order."""
    if may_refuse(backend, "return_lse"):
        pytest.skip(f"{backend} gives no lse to merge by")
    spec = MERGEABLE[name]
    whole = random_problem([3, 1], [23, 22], spec, seed=seed, max_query_len=4, poison=None)
    first, second = sorted(4 * n for n in splits)
    tables = np.array([[*row, *[-1] * (6 - len(row))] for row in whole.block_tables])
    context = replace_spec(whole, causal=False)
    parts = [
        run(part(context, tables, 0, first), backend),
        run(part(context, tables, first, second), backend),
        run(part(whole, tables, second, None), backend),
    ]
    left = merge_states(*merge_states(*parts[0], *parts[1]), *parts[2])
    right = merge_states(*parts[0], *merge_states(*parts[1], *parts[2]))
    for merged in (left, right):
        assert_same(merged, run(whole, backend), "merged")
        assert_attention_close(*merged, whole, name=f"{backend}, merged")


def part(problem, tables, start, stop):
    """The keys from start to stop (in whole blocks) of every sequence, as cross attention."""
    lens = [(n if stop is None else stop) - start for n in problem.seq_lens]
    rows = np.full_like(tables, -1)
    kept = tables[:, start // 4 :]
    rows[:, : kept.shape[1]] = kept
    return problem.replace(block_tables=rows, seq_lens=lens).poisoned()


@pytest.mark.parametrize(("name", "mode"), [*((name, "jit") for name in SPECS), ("all", "eager")])
def test_ragged_attention_is_paged_attention(backend, mode, name):
    """Packed keys without a cache, with more and with fewer keys than queries."""
    rng = np.random.default_rng(0)
    query_lens, key_lens = [5, 1, 0, 4, 3], [5, 9, 2, 0, 1]
    query = rng.standard_normal((15, 4, 16)).astype(np.float32)
    key, value = rng.standard_normal((2, 20, 2, 16)).astype(np.float32)
    key[17:] = value[17:] = query[13:] = np.nan  # padding on both sides
    starts = [np.concatenate([[0], np.cumsum(n)]).astype(np.int32) for n in (query_lens, key_lens)]
    call = RAGGED if mode == "jit" else ragged_attention
    spec = supported(mixed(SPECS[name]), backend).spec
    return_lse = not may_refuse(backend, "return_lse")
    sizes = {"max_query_len": 8, "max_key_len": 16}
    arrays = [jnp.asarray(x) for x in (query, key, value, *starts)]
    got = call(*arrays, spec, **sizes, backend=backend, return_lse=return_lse)
    tables = [range(start, stop) for start, stop in itertools.pairwise(starts[1])]
    pools = key[:, None], value[:, None]
    want = reference_attention(query, *pools, tables, key_lens, starts[0], spec)
    assert_same(got if return_lse else (got, None), want, "ragged")


RAGGED = jax.jit(
    ragged_attention,
    static_argnames=("spec", "max_query_len", "max_key_len", "backend", "return_lse"),
)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_alibi_is_exact_at_100k_tokens(backend, dtype):
    """Keys of zero: the softmax is that of the biases alone, over 100 003 positions.

    With slope -1 the first keys, at distances 100 002, 100 001, ..., weigh most: distances that
    were rounded to bfloat16 would tie there.
    """
    slopes = (1e-4, -1.0, 0.5, 2e-5)
    problem = random_problem(
        [1, 2],
        [100_003, 4],
        AttentionSpec(alibi_slopes=slopes),
        num_kv_heads=1,
        block_size=128,
        dtype=dtype,
        max_query_len=2,
    )
    problem = problem.replace(key_cache=np.zeros_like(problem.key_cache))
    out, lse = run(problem, backend)
    assert_attention_close(out, lse, problem, name=backend)
    if lse is not None:
        want = [np.logaddexp.reduce(-slope * np.arange(100_003)) for slope in slopes]
        np.testing.assert_allclose(lse[0], want, rtol=2e-5)


@given(dtype=dtypes(), seed=seeds())
def test_identical_values_average_to_themselves(backend, dtype, seed):
    """With one value everywhere the weights must sum to one, whatever they are."""
    problem = supported(mixed(SPECS["all"], dtype=dtype, seed=seed), backend)
    value = np.where(np.isnan(problem.value_cache), problem.value_cache, 1).astype(dtype)
    out, _ = run(problem.replace(value_cache=value), backend)
    seen = np.isfinite(expect(problem).lse)
    allowed = float(ml_dtypes.finfo(dtype).eps) + 1e-6
    np.testing.assert_allclose(out.astype(np.float64)[seen], 1, atol=allowed)


@pytest.mark.parametrize("name", SPECS)
def test_float64_is_right_or_refused(backend, name):
    """Over enough keys for vectors: torch misread float32 masks beside 16 keys and more.

    On a CPU, where the backend runs there.
    """
    problem = random_problem([1, 1, 7, 40], [3, 40, 33, 50], SPECS[name], dtype=np.float64)
    device = None if wrong_device(backend, "cpu") else jax.devices("cpu")[0]
    with jax.default_device(device), jax.enable_x64(True):
        query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
        assert query.dtype == cache.dtype == np.float64
        if reasons := explain(query, cache, batch, problem.spec)[backend]:
            assert "float64" in " ".join(reasons)
            return
        out = paged_attention(query, cache, batch, problem.spec, backend=backend)
        assert_attention_close(out, None, problem, name=backend)


@pytest.mark.parametrize("size", [50.0, 300.0])
def test_large_logits_do_not_overflow(backend, size):
    problem = mixed(AttentionSpec(scale=size))
    out, lse = run(problem, backend)
    want = expect(problem)
    assert np.isfinite(out).all()
    assert_attention_close(out, lse, want, name=backend)


def test_one_backend_does_not_stand_in_for_another():
    """The two answer alike but not by the same program: see the primitives that jit records."""
    pytest.importorskip("torch")

    def program(backend):
        arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
        call = functools.partial(paged_attention, spec=problem.spec, backend=backend)
        return str(jax.make_jaxpr(call)(*arrays))

    problem = mixed()
    assert "ffi_call" in program("sdpa")
    assert "ffi_call" not in program("xla")


def test_bounds_on_packed_lengths_take_no_memory(backend):
    """As of a model's longest context: tables are no wider than all keys."""
    rows = [jnp.ones((5, heads, 16)) * jnp.arange(5.0)[:, None, None] for heads in (4, 2, 2)]
    starts = jnp.array([0, 3, 5])
    got, want = (
        ragged_attention(
            *rows, starts, starts, max_query_len=most, max_key_len=most, backend=backend
        )
        for most in (1 << 30, 3)
    )
    np.testing.assert_array_equal(got, want)


def test_no_keys_at_all_give_nothing():
    query, none = jnp.ones((3, 4, 8)), jnp.zeros((0, 2, 8))
    starts = jnp.array([0, 3])
    lens = {"max_query_len": 3, "max_key_len": 0}
    out, lse = ragged_attention(
        query, none, none, starts, 0 * starts, backend="xla", return_lse=True, **lens
    )
    assert not out.any()
    assert jnp.isneginf(lse).all()


@pytest.mark.parametrize("name", ["plain", "all"])
@given(data=st.data())
def test_starts_padded_with_zeros(backend, mode, name, data):
    """Behind the last sequence, as engines for TPUs have them, starts may be 0."""
    problem = data.draw(problems(**FLOAT32, spec=SPECS[name]))
    spec = supported(problem, backend).spec
    batch = batch_of(problem)
    zeros = functools.partial(jnp.pad, pad_width=(0, 2))
    padded = dataclasses.replace(
        batch,
        block_tables=jnp.pad(batch.block_tables, ((0, 2), (0, 0))),
        seq_lens=zeros(batch.seq_lens),
        query_start_loc=zeros(batch.query_start_loc),
    )
    arrays = jnp.asarray(problem.query), cache_of(problem)
    attend = ATTEND if mode == "jit" else attend_with_any_lse
    got, want = (attend(*arrays, b, spec, backend) for b in (padded, batch))
    assert_same(got, want, "zeros behind the starts")


@pytest.mark.parametrize("name", ["plain", "all"])
def test_ragged_starts_padded_with_zeros(backend, mode, name):
    rng = np.random.default_rng(0)
    spec = supported(mixed(SPECS[name]), backend).spec
    return_lse = not may_refuse(backend, "return_lse")
    arrays = [jnp.asarray(rng.standard_normal((9, h, 16)), jnp.float32) for h in (4, 2, 2)]
    starts = jnp.array([0, 4, 4, 9]), jnp.array([0, 2, 5, 9])
    call = RAGGED if mode == "jit" else ragged_attention
    options = {"max_query_len": 8, "max_key_len": 8, "backend": backend, "return_lse": return_lse}
    want = call(*arrays, *starts, spec, **options)
    got = call(*arrays, *(jnp.pad(x, (0, 2)) for x in starts), spec, **options)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def every_call(backend):
    """Traces every feature, of decodes and of longer queries: other phases have the same shapes."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4}
    for name, phase in itertools.product(OPTIONS, ("decode", "mixed")):
        problem = cell_problem(Cell(name, phase, "bfloat16", ""), sizes)
        arrays = jax.tree.map(jnp.asarray, problem.arrays)
        rows = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
        lse = not may_refuse(backend, "return_lse")
        options = {"spec": problem.spec, "backend": backend, "return_lse": lse}
        call = functools.partial(paged_attention, **options)
        try:
            jax.eval_shape(lambda rows, arrays, call=call: call(*rows, **arrays), rows, arrays)
        except UnsupportedError:
            assert backend in REFUSING


def step_on_a_pool(backend):
    """Traces the pool's functions, and a gradient of a step on what they give."""
    pool, _ = append_tokens(init_block_pool(9, 4, max_seqs=3, max_blocks=4), jnp.array([5, 0, 3]))
    pool, _ = fork(pool, jnp.array([0]), jnp.array([1]))
    pool, growth = append_tokens(pool, jnp.array([1, 2, 0]))
    pool, _ = share_blocks(release(pool, jnp.array([2]))[0], 2, pool.block_tables[0, :1], 4)
    pool = hold_blocks(pool, pool.block_tables[0])
    pool, _ = drop_blocks(pool, pool.block_tables[0])
    host = init_block_pool(9, 4, max_seqs=2, max_blocks=4)
    pool, host, _ = swap_out(pool, host, jnp.array([1]), jnp.array([0]))
    swap_out(release_behind(pool, 2)[0], host, jnp.array([0]), jnp.array([1]))
    sizes = {"num_tokens": 2, "max_query_len": 1}
    batch_from_pool(pool, jnp.array([1, 0, 0]), **sizes)
    (pool,), (batch,), _ = next_batches([pool], jnp.array([1, 0, 0]), **sizes)
    cache = init_kv_cache(9, 4, 2, 16, jnp.float32)
    cache = copy_blocks(cache, growth.copy_src, growth.copy_dst)

    def loss(rows):
        new = write_kv(cache, *rows, batch.slot_mapping)
        out = paged_attention(jnp.ones((2, 4, 16)), new, batch, SPECS["plain"], backend=backend)
        return merge_states(out, out[..., 0], out, out[..., 0])[0].sum()

    return jax.grad(loss)(jnp.ones((2, 2, 2, 16)))


def test_jax_may_be_told_to_promote_nothing(backend):
    """Ranks and dtypes are made equal by us, not by JAX's promotion, which happens in traces."""
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        every_call(backend)
        jax.eval_shape(functools.partial(step_on_a_pool, backend))
