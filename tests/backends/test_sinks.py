"""Sinks: a logit of each head that takes weight and has no value."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, good_call, may_refuse, mixed, run
from jax.test_util import check_grads

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    UnsupportedError,
    explain,
    merge_states,
    paged_attention,
    ragged_attention,
)
from pagedattn._dispatch.backend import Backend
from pagedattn.backends import xla
from pagedattn.testing import (
    assert_attention_close,
    batch_of,
    cache_of,
    random_problem,
    reference_attention,
)

PLAIN = SPECS["plain"]


@pytest.fixture
def backend(backend):
    """Those that give what sinks need."""
    if may_refuse(backend, "sinks"):
        pytest.skip(f"{backend} may refuse sinks")
    return backend


def problem_of(sinks, **kwargs):
    """A mixed batch; the first queries of its first sequence see no key."""
    problem = random_problem([6, 7, 1, 0], [4, 19, 22, 9], PLAIN, pad_tokens=17, **kwargs)
    return problem.replace(sinks=np.asarray(sinks, np.float32))


def test_rows_without_keys_have_the_sink_and_padding_has_none(backend, mode):
    problem = problem_of([0.5, -2, 3, -np.inf])
    out, lse = run(problem, backend, mode)
    assert_attention_close(out, lse, problem, name=backend)
    np.testing.assert_array_equal(lse[:2], np.tile(problem.sinks, (2, 1)))
    assert (lse[14:] == -np.inf).all()
    assert not out[:2].any()


def test_none_and_all(backend):
    """-inf changes nothing, and a sink far above all logits takes all weight."""
    out, lse = run(problem_of([-np.inf] * 4), backend)
    want = run(problem_of([-np.inf] * 4).replace(sinks=None), backend)
    np.testing.assert_allclose(out, want[0], rtol=1e-6)
    np.testing.assert_allclose(lse, want[1], rtol=1e-6)
    out, lse = run(problem_of([1e30] * 4), backend)
    assert not out.any()
    assert (lse[:14] == np.float32(1e30)).all()


def test_it_is_the_merge_with_a_state_without_value(mode):
    problem = mixed(SPECS["all"], arrays=["sinks"], dtype=np.float16)
    out, lse = run(problem.replace(sinks=None), "xla", mode)
    sinks = np.broadcast_to(problem.sinks, lse.shape)
    want = merge_states(out, lse, np.zeros_like(out), sinks)
    got = run(problem, "xla", mode)
    np.testing.assert_allclose(got[0][:18], want[0][:18], rtol=2e-3)
    np.testing.assert_allclose(got[1][:18], want[1][:18], rtol=1e-6)


def test_gradients(backend):
    """Of the sinks too: by finite differences, with rows that see no key, and a sink of -inf."""
    problem = problem_of([0.5, -2, 3, -np.inf], poison=None)
    batch, cache = batch_of(problem), cache_of(problem)
    weights = jax.random.normal(jax.random.key(0), problem.query.shape)

    def loss(query, sinks):
        options = {"backend": backend, "return_lse": True}
        out, lse = paged_attention(query, cache, batch, sinks=sinks, **options)
        return (out * weights).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    def finite(query, sinks):
        return loss(query, jnp.append(sinks, -jnp.inf))

    query, sinks = jnp.asarray(problem.query), jnp.asarray(problem.sinks)
    check_grads(jax.jit(finite), (query, sinks[:3]), 1, ["rev"], atol=2e-2, rtol=2e-2, eps=1e-2)
    assert all(np.isfinite(x).all() for x in jax.grad(loss, (0, 1))(query, sinks))


def test_cotangents_of_padding_tokens_may_be_nan(backend):
    problem = problem_of([0.5, -2, 3, -np.inf])
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    live = int(problem.query_start_loc[-1])

    def gradient(padding):
        def attend(query, sinks):
            return paged_attention(query, cache, batch, sinks=sinks, backend=backend)

        out, pull = jax.vjp(attend, query, jnp.asarray(problem.sinks))
        return pull(jnp.ones_like(out).at[live:].set(padding))

    assert live < len(query)
    jax.tree.map(np.testing.assert_array_equal, gradient(jnp.nan), gradient(0))


def test_a_backend_that_names_them_is_given_them():
    given = []

    def own(call, query, cache, batch, *, sinks):
        given.append((call.sinks, call.return_lse, sinks.dtype))
        return xla.run(call, query, cache, batch)

    backend = Backend("own", xla.SUPPORTS | {"sinks"}, own)
    paged_attention(*good_call(), backend=backend, sinks=jnp.zeros(4, jnp.bfloat16))
    assert given == [(True, False, jnp.bfloat16)]


def test_without_lse_they_are_refused_by_name():
    poor = Backend("poor", xla.SUPPORTS - {"return_lse"}, xla.run)
    with pytest.raises(UnsupportedError, match="sinks: poor does not have it"):
        paged_attention(*good_call(), backend=poor, sinks=jnp.zeros(4))
    assert explain(*good_call(), sinks=jnp.zeros(4))["xla"] == []


@pytest.mark.parametrize("sinks", [jnp.zeros(3), jnp.zeros((4, 1)), jnp.zeros(4, jnp.int32), [0.0]])
def test_wrong_shapes_and_dtypes(sinks):
    with pytest.raises(InvalidInputError, match="sinks"):
        paged_attention(*good_call(), sinks=sinks)


def test_packed_keys():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 5, 2, 8)).astype(np.float32)
    sinks, starts = np.float32([1, -1]), np.array([0, 2, 5])
    options = {"max_query_len": 3, "max_key_len": 3, "return_lse": True, "sinks": sinks}
    got = ragged_attention(query, key, value, starts, starts, **options)
    pools, tables = (key[:, None], value[:, None]), [range(2), range(2, 5)]
    want = reference_attention(query, *pools, tables, [2, 3], starts, AttentionSpec(), sinks)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_a_call_without_keys():
    """No block table at all: every token sees no key."""
    problem = random_problem([1], [0], PLAIN, pad_tokens=2, arrays=["sinks"])
    batch = batch_of(problem)
    assert batch.max_blocks == 0
    out, lse = run(problem, "xla", "eager")
    np.testing.assert_array_equal(lse, [problem.sinks, [-np.inf] * 4])
    assert not out.any()
