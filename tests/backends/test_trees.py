"""Drafts that branch: a token sees the context and its own line of descent."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from cases import good_call, grown, lacks, mixed, own_indices, padded, run
from hypothesis import given, settings
from hypothesis import strategies as st
from supporting import backends_with, backends_without

import pagedattn as pa
from pagedattn._dispatch import registry
from pagedattn._dispatch.backend import LACKS
from pagedattn._dispatch.call import call_of
from pagedattn._dispatch.registry import Framework
from pagedattn.testing import assert_attention_close, attend, random_problem
from pagedattn.testing.features import signed_slopes
from pagedattn.testing.strategies import BUCKETS, options_table, problems, seeds

EVERY = pa.AttentionSpec(
    scale=0.4, sliding_window=6, logits_soft_cap=2.0, alibi_slopes=signed_slopes(4)
)
SPECS = {"plain": pa.AttentionSpec(), "every": EVERY}


# The heads and blocks of mosaic are larger than those of these tests: test_mosaic has its own.
every_backend = pytest.mark.parametrize(
    ("framework", "name"), backends_with("parents", but=("mosaic",))
)


def solve(framework, name, problem, jit=True):
    """out and lse of a problem by a backend, in numpy."""
    if framework is Framework.TORCH:
        from tensors import by_torch

        return by_torch(problem, name)
    return [np.asarray(x, np.float32) for x in run(problem, name, "jit" if jit else "eager")]


@every_backend
def test_any_tree_matches_the_oracle(framework, name):
    """With any options, among prompts and decodes, poison wherever nobody may look."""
    table = options_table(BUCKETS[0].num_heads)
    known = [table[option] for option in table if not lacks(name, option, framework)]
    known = [options for options in known if options.spec.causal]
    known = [options for options in known if "selection" not in options.arrays]  # all refuse it

    @settings(settings(), max_examples=settings().max_examples // 2)
    @given(data=st.data(), seed=seeds(), branching=st.sampled_from([0.1, 0.5, 1.0]))
    def check(data, seed, branching):
        options = data.draw(st.sampled_from(known))._asdict()
        problem = data.draw(problems(bucket=BUCKETS[0], poison=False, **options))
        problem = grown(problem, seed, branching).poisoned()
        assert_attention_close(*solve(framework, name, problem), problem, name=name)

    check()


@every_backend
@pytest.mark.parametrize("spec", SPECS)
def test_a_chain_is_causal_attention_in_every_bit(framework, name, spec):
    problem = mixed(SPECS[spec])
    chain = problem.replace(parents=padded(problem, own_indices(problem) - 1))
    for got, want in zip(*(solve(framework, name, p) for p in (chain, problem)), strict=True):
        np.testing.assert_array_equal(got, want)


CONTEXT, DRAFTS = 21, 12


def one_tree(spec, seed):
    """A tree on a context; blocks of one token, so that a table says which tokens there are."""
    problem = random_problem([DRAFTS], [CONTEXT + DRAFTS], spec, block_size=1, seed=seed)
    return grown(problem, seed, branching=0.7)


def with_new(problem, tokens, parents):
    """The problem of some of its new tokens, which come in another order."""
    table = np.asarray(problem.block_tables[0])
    table = np.append(table[:CONTEXT], table[CONTEXT:][tokens])
    return problem.replace(
        query=problem.query[tokens],
        block_tables=table[None],
        query_lens=[len(tokens)],
        seq_lens=[CONTEXT + len(tokens)],
        parents=parents,
    )


def assert_close(got, want):
    for pair in zip(got, want, strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-5)


@every_backend
@pytest.mark.parametrize("spec", SPECS)
@settings(settings(), max_examples=5)
@given(seed=seeds())
def test_each_line_alone_gives_the_same_rows(framework, name, spec, seed):
    problem = one_tree(SPECS[spec], seed)
    results = solve(framework, name, problem)
    leaves = sorted({*range(DRAFTS)} - {*problem.parents.tolist()})
    for leaf in leaves[:3]:
        line = [leaf]
        while problem.parents[line[0]] >= 0:
            line.insert(0, int(problem.parents[line[0]]))
        alone = with_new(problem, line, None)
        assert_close(solve(framework, name, alone), [rows[line] for rows in results])


@every_backend
@pytest.mark.parametrize("spec", SPECS)
@settings(settings(), max_examples=5)
@given(seed=seeds())
def test_the_order_of_siblings_is_of_no_account(framework, name, spec, seed):
    problem, rng = one_tree(SPECS[spec], seed), np.random.default_rng(seed)
    order = []  # any in which parents come before their children
    while len(order) < DRAFTS:
        ready = [i for i in range(DRAFTS) if problem.parents[i] in (-1, *order) and i not in order]
        order.append(int(rng.choice(ready)))
    places = np.append(np.argsort(order), -1)  # of each token in the new order; -1 stays -1
    other = with_new(problem, order, places[problem.parents[order]])
    results = solve(framework, name, problem)
    assert_close(solve(framework, name, other), [rows[order] for rows in results])


@pytest.mark.parametrize("mode", ["eager", "jit"])
def test_eager_and_jit_agree(mode):
    problem = grown(mixed(EVERY), 3)
    got = [np.asarray(x) for x in attend(problem, backend="xla", jit=mode == "jit")]
    assert_attention_close(*got, problem, name=mode)


@pytest.mark.parametrize("backend", backends_without("parents"))
def test_others_refuse_them_by_name(backend):
    call = call_of(*good_call())
    device = next(iter(registry.BUILT_IN[backend.name].devices), call.device)
    call = dataclasses.replace(call, device=device, parents=True)
    assert f"parents: {backend} {LACKS}" in backend.why_not(call)


def batch_of_tree(parents, **options):
    sizes = {"block_size": 4, **options}
    return pa.make_batch([len(parents)], [6], [[0, 1, 2]], parents=parents, **sizes)


def test_no_backend_promises_their_bits():
    cache, query = pa.init_kv_cache(3, 4, 1, 8), jnp.ones((2, 1, 8), jnp.bfloat16)
    reasons = pa.explain(query, cache, batch_of_tree([-1, -1]), batch_invariant=True)
    assert all(reasons.values())
    assert "batch_invariant: the keys of draft trees" in " ".join(reasons["xla"])


def test_none_has_them_with_chosen_blocks():
    cache, query = pa.init_kv_cache(3, 4, 1, 8), jnp.ones((2, 1, 8), jnp.bfloat16)
    chosen = pa.Selection(jnp.zeros((1, 1, 1), jnp.int32))
    reasons = pa.explain(query, cache, batch_of_tree([-1, -1]), selection=chosen)
    assert all(reasons.values())
    assert "selection: draft trees" in " ".join(reasons["xla"])


def test_without_causality_there_are_no_lines():
    cache, query = pa.init_kv_cache(3, 4, 1, 8), jnp.ones((2, 1, 8), jnp.bfloat16)
    with pytest.raises(pa.InvalidInputError, match="causal attention alone has them"):
        pa.paged_attention(query, cache, batch_of_tree([-1, 0]), pa.AttentionSpec(causal=False))


@pytest.mark.parametrize("torch", [False, True])
def test_ragged_attention_takes_parents(torch):
    rng, parents = np.random.default_rng(0), np.array([-1, 0, 0, 1, -1, -1, 1])
    starts, keys = np.array([0, 4, 7]), np.array([0, 9, 14])
    query, key, value = (rng.standard_normal((n, 2, 8), np.float32) for n in (7, 14, 14))
    sizes = {"max_query_len": 4, "max_key_len": 9}
    arrays = query, key, value, starts, keys
    if torch:
        from torch import from_numpy as convert

        import pagedattn_torch as library
    else:
        library, convert = pa, jnp.asarray
    out = library.ragged_attention(*map(convert, arrays), parents=convert(parents), **sizes)
    tables = [range(9), range(9, 14)]
    batch = pa.make_batch([4, 3], None, tables, key_lens=[9, 5], block_size=1, parents=parents)
    cache = pa.KVCache(*(jnp.asarray(x)[:, None] for x in (key, value)))
    want = pa.paged_attention(jnp.asarray(query), cache, batch, backend="xla")
    np.testing.assert_allclose(np.asarray(out), want, rtol=1e-5, atol=1e-5)
