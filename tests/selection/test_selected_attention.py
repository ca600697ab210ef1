"""Attention over chosen blocks: a set, at true positions, which others need not look at."""

import dataclasses
import itertools
import os
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import replace_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    InvalidInputError,
    KVCache,
    Selection,
    UnsupportedError,
    available_backends,
    explain,
    make_batch,
    merge_states,
    paged_attention,
    ragged_attention,
    score_blocks,
    select_blocks,
    summarise_blocks,
    update_summaries,
)
from pagedattn._dispatch import registry
from pagedattn._dispatch.registry import Framework, load
from pagedattn.selection.summaries import KINDS
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.running import attend
from pagedattn.testing.strategies import BUCKETS, Options, options_table, problems, seeds

BUCKET = BUCKETS[0]
DEVICE = jax.default_backend().replace("gpu", "cuda")
HERE = [name for name in available_backends() if not registry.wrong_device(name, DEVICE)]
HAVE = [name for name in HERE if "selection" in load(name, Framework.JAX).supports]
EXAMPLES = 6


def options_for(backend):
    """Options that a backend has, with sinks and bias but without a selection or a tree."""
    record = load(backend, Framework.JAX)
    table = options_table(BUCKET.num_heads).values()
    alone = [x for x in table if "selection" not in x.arrays and "parents" not in (x.cache or {})]
    known = [x for x in alone if not any(map(record.lacks, x.arrays))]
    return st.sampled_from([*known, Options(AttentionSpec(), ("sinks",))])


def drawn(data, backend, **kwargs):
    options = data.draw(options_for(backend))._asdict()
    return data.draw(problems(bucket=BUCKET, **options, **kwargs))


def solve(problem, backend, jit=True, **options):
    return [np.asarray(x) for x in attend(problem, backend=backend, jit=jit, **options)]


def assert_equal(got, want):
    for pair in zip(got, want, strict=True):
        np.testing.assert_array_equal(*pair)


def chosen(rng, problem, most=10):
    return rng.integers(-1, most, (len(problem.seq_lens), 2, most)).astype(np.int32)


@pytest.mark.parametrize("backend", HAVE)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), seed=seeds())
def test_all_blocks_are_dense_attention_in_every_bit(backend, data, seed):
    problem, options = drawn(data, backend), {"batch_invariant": data.draw(st.booleans())}
    blocks = np.tile(np.arange(BUCKET.max_blocks, dtype=np.int32), (BUCKET.num_seqs, 2, 1))
    want = solve(problem, backend, **options)
    assert_equal(solve(problem.replace(selection=blocks), backend, **options), want)
    shuffled = np.random.default_rng(seed).permuted(blocks, axis=2)
    again = problem.replace(selection=shuffled)
    assert_equal(solve(again, backend, jit=False, **options), want)


@pytest.mark.parametrize("backend", HAVE)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), seed=seeds())
def test_a_selection_is_a_set_and_what_it_leaves_out_may_hold_nan(backend, data, seed):
    """Neither order nor doubles nor numbers out of range tell; nor does jit."""
    problem = drawn(data, backend, poison=False)
    rng = np.random.default_rng(seed)
    blocks = chosen(rng, problem)
    problem = problem.replace(selection=blocks)
    want = solve(problem, backend)
    assert_attention_close(*want, problem, name=backend)
    for jit in (True, False):
        assert_equal(solve(problem.poisoned(), backend, jit), want)
    doubled = np.concatenate([blocks, np.full_like(blocks, 10**6), blocks[..., ::-1]], axis=2)
    others = problem.replace(selection=rng.permuted(doubled, axis=2))
    assert_equal(solve(others, backend), want)


@pytest.mark.parametrize("backend", HAVE)
@settings(max_examples=EXAMPLES)
@given(data=st.data(), seed=seeds())
def test_two_parts_merge_to_the_whole(backend, data, seed):
    """Only one of the parts has the sinks."""
    problem = drawn(data, backend, dtype=np.float32)
    blocks = chosen(np.random.default_rng(seed), problem)
    whole = problem.replace(selection=blocks)
    first = whole.replace(selection=np.where(blocks % 3 == 0, blocks, -1))
    second = whole.replace(selection=np.where(blocks % 3 != 0, blocks, -1), sinks=None)
    parts = itertools.chain(solve(first, backend), solve(second, backend))
    merged = [np.asarray(x) for x in merge_states(*parts)]
    live = np.arange(len(whole.query)) < whole.query_start_loc[-1]
    for got, want in zip(merged, solve(whole, backend), strict=True):
        np.testing.assert_allclose(got[live], want[live], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backend", HAVE)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("window", [None, 200])
def test_few_blocks_of_long_sequences(backend, dtype, window):
    """Decode and short queries, whose blocks lie far apart, some of them behind the window."""
    spec = AttentionSpec(sliding_window=window)
    lens = [1, 1, 4], [3000, 700, 2100]
    problem = random_problem(*lens, spec, block_size=16, dtype=dtype, poison=None, seed=3)
    rng = np.random.default_rng(0)
    rows = [[rng.permutation(-(-n // 16))[:40] for _ in range(2)] for n in lens[1]]
    problem = problem.replace(selection=np.array(rows, np.int32)).poisoned()
    assert_attention_close(*solve(problem, backend), problem, name=backend)


@pytest.mark.parametrize("backend", HAVE)
def test_no_block_at_all(backend):
    """Tokens without keys have 0 and -inf, or their sinks."""
    problem = random_problem([1, 3], [9, 20], AttentionSpec(), arrays=["sinks"], poison=None)
    problem = problem.replace(selection=np.full((2, 2, 3), -1, np.int32)).poisoned()
    out, lse = solve(problem, backend)
    assert not out.any()
    np.testing.assert_allclose(lse, np.tile(problem.sinks, (4, 1)), rtol=1e-6)
    assert np.isneginf(solve(problem.replace(sinks=None), backend)[1]).all()


@pytest.mark.parametrize("backend", HAVE)
def test_keys_of_packed_arrays_may_be_chosen(backend):
    """Without a cache blocks are of one token."""
    rng = np.random.default_rng(0)
    query, key, value = jnp.asarray(rng.standard_normal((3, 7, 2, 16)), jnp.float32)
    starts = jnp.array([0, 3, 7])
    sizes = {"max_query_len": 4, "max_key_len": 4, "backend": backend}
    blocks = jnp.array([[[2, 0, -1]] * 2, [[3, 1, 1]] * 2])
    got = ragged_attention(query, key, value, starts, starts, selection=Selection(blocks), **sizes)
    hidden = jnp.array([[0, 9, 0, 9]] * 3 + [[9, 0, 9, 0]] * 4) > 0
    bias = jnp.where(hidden, -jnp.inf, 0.0)[:, None]
    sizes["backend"] = "xla"
    want = ragged_attention(query, key, value, starts, starts, bias=bias, **sizes)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", [name for name in HERE if name not in HAVE])
def test_others_refuse_it_by_its_name(backend):
    problem = random_problem([1], [9], AttentionSpec()).replace(selection=np.zeros((1, 2, 1), int))
    with pytest.raises(UnsupportedError, match="selection: "):
        attend(problem, backend=backend)


def test_what_is_no_selection_or_does_not_fit_is_refused():
    problem = random_problem([1, 2], [9, 7], AttentionSpec())
    call = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    good = jnp.zeros((2, 2, 3), int)
    with pytest.raises(InvalidInputError, match="selection must be a Selection, got"):
        paged_attention(*call, selection=good)
    for wrong in (good[0], good.astype(float)):
        with pytest.raises(InvalidInputError, match=r"selection\.blocks must be integers of 3"):
            paged_attention(*call, selection=Selection(wrong))
    with pytest.raises(InvalidInputError, match="room for at least one block"):
        explain(*call, selection=Selection(good[..., :0]))
    for wrong in (good[:1], jnp.zeros((2, 4, 3), int)):
        with pytest.raises(InvalidInputError, match=r"selection\.blocks must be \[num_seqs"):
            paged_attention(*call, selection=Selection(wrong))
    with pytest.raises(InvalidInputError, match=r"selection\.ascending must be True or False"):
        paged_attention(*call, selection=dataclasses.replace(Selection(good), ascending=2))


def test_windows_and_positions_are_those_of_the_sequence():
    """A window shows the same keys of a selection as of all blocks; ALiBi sees their distances."""
    problem = random_problem([1], [40], AttentionSpec(sliding_window=9), poison=None)
    near = np.array([[[7, 8, 9], [9, 8, 7]]], np.int32)  # tokens 28 to 39; the window begins at 31
    far = np.array([[[0, 1, 2, 7, 8, 9]] * 2], np.int32)
    problem = replace_spec(problem, alibi_slopes=(0.5, -0.5, 0.25, 0.1))
    want = solve(problem, "xla")
    for blocks in (near, far):
        got = solve(problem.replace(selection=blocks), "xla")
        for pair in zip(got, want, strict=True):
            np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", HAVE)
def test_a_window_without_a_chosen_block_is_empty(backend):
    blocks = np.zeros((1, 2, 1), np.int32)
    problem = random_problem([40], [200], AttentionSpec(sliding_window=4))
    out, lse = solve(problem.replace(selection=blocks), backend)
    assert np.isneginf(lse).all()
    assert not out.any()


@pytest.mark.parametrize("wrap", [lambda function: function, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", [s for s in itertools.product([0, 3], repeat=4) if not all(s)])
def test_nothing_to_choose_from(sizes, kind, wrap):
    """Without tokens, sequences, columns of tables or blocks, by all calls of a step."""
    num_tokens, num_seqs, max_blocks, num_blocks = sizes
    plane, query = jnp.ones((num_blocks, 4, 2, 8)), jnp.ones((num_tokens, 4, 8))
    cache, none = KVCache(plane, plane), partial(jnp.zeros, dtype=jnp.int32)
    batch = BatchMetadata(
        block_tables=none((num_seqs, max_blocks)),
        seq_lens=none(num_seqs),
        query_start_loc=none(num_seqs + 1),
        slot_mapping=none(num_tokens) - 1,
        positions=none(num_tokens),
        block_size=4,
        max_query_len=2,
    )
    summaries = wrap(partial(summarise_blocks, kind=kind))(cache, batch)
    summaries = wrap(update_summaries)(summaries, cache, batch)
    scores = wrap(score_blocks)(query, summaries, batch)
    assert scores.shape == (num_seqs, 2, max_blocks)
    assert np.isneginf(scores).all()
    selection = wrap(partial(select_blocks, num_blocks=2))(scores, batch)
    out = wrap(partial(paged_attention, selection=selection))(query, cache, batch)
    assert out.shape == query.shape
    assert not out.any()


@pytest.mark.skipif("numba" not in HAVE, reason="takes the CPU's kernel")
@pytest.mark.parametrize("byte", ["1", "255"])
def test_what_new_memory_holds_does_not_matter(byte):
    """glibc fills what it allocates, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    command += [__file__, "-k", "numba and not memory"]
    environment = os.environ | {"MALLOC_PERTURB_": byte}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


UNTRUE = [1 << 28, 0, 1], [1 << 20, 0, 1], [2, 0, 1], [0, 0, 1], [0, -1, 1], [-1, 0, 1]


@pytest.mark.parametrize("backend", HAVE)
@pytest.mark.parametrize("blocks", UNTRUE)
def test_what_does_not_rise_as_it_says_reads_nothing_outside(blocks, backend):
    """It is refused where its values are known, and else has results that nothing is said of."""
    planes = jax.random.normal(jax.random.key(0), (2, 3, 8, 1, 64))
    cache, query = KVCache(*planes), jnp.ones((1, 2, 64))
    batch = make_batch([1], [16], [[0, 1, 2]], block_size=8)
    untrue = Selection(jnp.array([[blocks]]), ascending=True)
    with pytest.raises(InvalidInputError, match=r"selection\.blocks must rise"):
        paged_attention(query, cache, batch, backend=backend, selection=untrue)
    in_jit = jax.jit(partial(paged_attention, backend=backend))
    assert in_jit(query, cache, batch, selection=untrue).shape == query.shape
