"""merge_across: the states of all devices along an axis, joined on each of them.

An axis of `jax.vmap` stands for the devices here; on devices: tests/parallel.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from pagedattn import InvalidInputError, merge_across, merge_states

PARTS, TOKENS, HEADS, KEYS, DIM = 4, 3, 2, 12, 8
owners = st.lists(st.integers(0, PARTS - 1), min_size=KEYS, max_size=KEYS).map(np.array)
seeds = st.integers(0, 99)


def over_parts(merge):
    return jax.jit(jax.vmap(functools.partial(merge, axis_name="part"), axis_name="part"))


ACROSS = over_parts(merge_across)


def keys(seed: int):
    """Logits of all tokens over all keys, some of them hidden, and the keys' values."""
    rng = np.random.default_rng(seed)
    logits = rng.uniform(-20, 20, (TOKENS, HEADS, KEYS))
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    logits[rng.integers(TOKENS), 0] = -np.inf  # a row that sees no key
    return logits, rng.standard_normal((KEYS, HEADS, DIM))


def attended(logits, values):
    """out and lse in float64, by the formula."""
    weights = np.exp(logits)
    total = weights.sum(-1)
    seen = total > 0
    out = np.einsum("thk,khd->thd", weights / np.where(seen, total, 1)[..., None], values)
    return out, np.log(total, where=seen, out=np.full(total.shape, -np.inf))


def parts_of(seed: int, owner, nothing=-np.inf, dtype=np.float32):
    """The state of each part; rows that saw no key have `nothing` for lse and NaN for out."""
    logits, values = keys(seed)
    states = [attended(logits[..., owner == part], values[owner == part]) for part in range(PARTS)]
    out, lse = (np.stack(arrays) for arrays in zip(*states, strict=True))
    empty = np.isneginf(lse)
    out = np.where(empty[..., None], np.nan, out)
    return jnp.asarray(out, dtype), jnp.asarray(np.where(empty, nothing, lse), jnp.float32)


@given(seed=seeds, owner=owners, nothing=st.sampled_from([-np.inf, np.inf]))
def test_however_keys_are_spread_the_whole_comes_out_everywhere(seed, owner, nothing):
    out, lse = ACROSS(*parts_of(seed, owner, nothing))
    for part in range(PARTS):
        np.testing.assert_array_equal(out[part], out[0])
        np.testing.assert_array_equal(lse[part], lse[0])
    want_out, want_lse = attended(*keys(seed))
    np.testing.assert_allclose(out[0], want_out, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lse[0], want_lse, rtol=1e-6, atol=1e-6)


@given(seed=seeds, owner=owners)
def test_is_merge_states_folded(seed, owner):
    out, lse = parts_of(seed, owner)
    want = functools.reduce(lambda a, b: merge_states(*a, *b), zip(out, lse, strict=True))
    got = ACROSS(out, lse)
    np.testing.assert_allclose(got[0][0], want[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[1][0], want[1], rtol=1e-6, atol=1e-6)


def test_where_no_part_saw_a_key_it_is_empty():
    out, lse = parts_of(0, np.zeros(KEYS, int))
    out, lse = ACROSS(jnp.full_like(out, jnp.nan), jnp.full_like(lse, -jnp.inf))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


@given(seed=seeds, size=st.sampled_from([-3e4, 3e4]))
def test_halves_are_summed_in_float32(seed, size):
    """As many lses as one likes: only the last rounding, to the result's dtype, is seen."""
    rng = np.random.default_rng(seed)
    out = jnp.asarray(rng.standard_normal((PARTS, TOKENS, HEADS, DIM)), jnp.bfloat16)
    lse = jnp.asarray(rng.uniform(-1, 1, (PARTS, TOKENS, HEADS)) + size, jnp.float32)
    got = ACROSS(out, lse)[0]
    assert got.dtype == jnp.bfloat16
    weights = np.exp(np.asarray(lse, np.float64) - np.asarray(lse).max(0))
    want = (np.asarray(out, np.float64) * weights[..., None]).sum(0) / weights.sum(0)[..., None]
    np.testing.assert_allclose(np.asarray(got[0], np.float64), want, rtol=2**-8, atol=1e-6)


def test_gradients_are_those_of_the_folded_merge():
    out, lse = parts_of(1, np.arange(KEYS) % PARTS)
    out = jnp.nan_to_num(out)

    def square(merged):
        return (merged[0] ** 2).sum() + (jnp.where(merged[1] > -jnp.inf, merged[1], 0) ** 2).sum()

    def across(out, lse):
        return square([x[0] for x in ACROSS(out, lse)])

    def folded(out, lse):
        return square(
            functools.reduce(lambda a, b: merge_states(*a, *b), zip(out, lse, strict=True))
        )

    got, want = (jax.jit(jax.grad(f, (0, 1)))(out, lse) for f in (across, folded))
    for a, b in zip(got, want, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_the_result_is_known_not_to_vary():
    """shard_map lets it out unsharded, with its check of replication on."""
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("device", "other"))
    out, lse = (x[0] for x in parts_of(2, np.zeros(KEYS, int)))
    for axes in ("device", ("device", "other")):
        merge = functools.partial(merge_across, axis_name=axes)
        stacked, everywhere = PartitionSpec(axes), PartitionSpec()
        spread = jax.shard_map(merge, mesh=mesh, in_specs=stacked, out_specs=everywhere)
        got = jax.jit(spread)(out, lse)
        np.testing.assert_allclose(got[0], jnp.nan_to_num(out), rtol=1e-6)
        np.testing.assert_allclose(got[1], lse, rtol=1e-6)


@pytest.mark.parametrize(
    "setting", [("numpy_rank_promotion", "raise"), ("numpy_dtype_promotion", "strict")]
)
def test_jax_may_be_told_to_promote_nothing(setting):
    with getattr(jax, setting[0])(setting[1]):
        out, _ = over_parts(merge_across)(*parts_of(3, np.zeros(KEYS, int), dtype=jnp.bfloat16))
    assert jnp.isfinite(out).all()


@pytest.mark.parametrize("axis", ["nowhere", None, [], 3, ("part", "nowhere")])
def test_an_axis_that_is_not_there_is_named(axis):
    out, lse = parts_of(0, np.zeros(KEYS, int))
    with pytest.raises(InvalidInputError, match="axis_name must name") as error:
        jax.vmap(functools.partial(merge_across, axis_name=axis), axis_name="part")(out, lse)
    assert repr(axis) in str(error.value)
    with pytest.raises(InvalidInputError, match="axis_name must name"):
        merge_across(out, lse, "part")  # no axis at all


@pytest.mark.parametrize("cut", [np.s_[:-1], np.s_[:, :-1]])
def test_arrays_that_do_not_belong_together(cut):
    out, lse = jnp.ones((TOKENS, HEADS, DIM)), jnp.ones((TOKENS, HEADS))
    with pytest.raises(InvalidInputError, match="merge_across expects"):
        merge_across(out, lse[cut], "part")
    with pytest.raises(InvalidInputError, match="lse must be floating"):
        merge_across(out, lse.astype(jnp.int32), "part")
