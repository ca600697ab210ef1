"""merge_states: associative, commutative, with an identity."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import InvalidInputError, merge_states


def state(seed: int, empty: bool = False, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    out = jnp.asarray(rng.standard_normal((5, 3, 8)), dtype)
    lse = jnp.asarray(rng.uniform(-30, 30, (5, 3)), jnp.float32)
    return (jnp.zeros_like(out), jnp.full_like(lse, -jnp.inf)) if empty else (out, lse)


def assert_same(a, b):
    np.testing.assert_allclose(a[0], b[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-6, atol=1e-5)


@given(seeds=st.tuples(*[st.integers(0, 99)] * 3), empties=st.tuples(*[st.booleans()] * 3))
def test_associative_and_commutative(seeds, empties):
    a, b, c = (state(s, e) for s, e in zip(seeds, empties, strict=True))
    assert_same(merge_states(*merge_states(*a, *b), *c), merge_states(*a, *merge_states(*b, *c)))
    assert_same(merge_states(*a, *b), merge_states(*b, *a))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_an_empty_state_is_the_identity(dtype):
    whole, nothing = state(0, dtype=dtype), state(0, empty=True, dtype=dtype)
    for out, lse in (merge_states(*whole, *nothing), merge_states(*nothing, *whole)):
        assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
        np.testing.assert_array_equal(out, whole[0])
        np.testing.assert_array_equal(lse, whole[1])


def test_two_empty_states_are_empty():
    out, lse = merge_states(*state(0, empty=True), *state(1, empty=True))
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)


def test_an_empty_state_may_hold_nan():
    whole, (out, lse) = state(0), state(1, empty=True)
    np.testing.assert_array_equal(merge_states(out + jnp.nan, lse, *whole)[0], whole[0])


def test_by_hand():
    out, lse = merge_states(
        jnp.array([[1.0]]), jnp.log(jnp.array([1.0])), jnp.array([[5.0]]), jnp.log(jnp.array([3.0]))
    )
    np.testing.assert_allclose(out, [[4.0]], rtol=1e-6)
    np.testing.assert_allclose(lse, [np.log(4)], rtol=1e-6)


def test_far_apart_and_huge_lse_do_not_overflow():
    ones = jnp.ones((1, 2))
    out, lse = merge_states(ones, jnp.array([3e4]), 2 * ones, jnp.array([-3e4]))
    np.testing.assert_array_equal(out, ones)
    np.testing.assert_array_equal(lse, [3e4])


@pytest.mark.parametrize("cut", [np.s_[:-1], np.s_[:, :-1]])
def test_shapes_that_do_not_belong_together(cut):
    (out, lse), (other, other_lse) = state(0), state(1)
    with pytest.raises(InvalidInputError, match="merge_states expects"):
        merge_states(out, lse, other[cut], other_lse)
    with pytest.raises(InvalidInputError, match="merge_states expects"):
        merge_states(out, lse, other, other_lse[cut])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("nothing", [np.inf, -np.inf])
@given(seeds=st.tuples(*[st.integers(0, 99)] * 2), data=st.data())
def test_both_marks_of_an_empty_part(nothing, dtype, seeds, data):
    """FlashAttention 2 gives rows without keys +inf, with anything as out: row by row the same."""
    (out_a, lse_a), (out_b, lse_b) = (state(seed, dtype=dtype) for seed in seeds)
    empty_a, empty_b = (
        np.array(data.draw(st.lists(st.booleans(), min_size=15, max_size=15))).reshape(5, 3)
        for _ in range(2)
    )
    marked = [
        (jnp.where(empty[..., None], jnp.nan, out), jnp.where(empty, nothing, lse))
        for out, lse, empty in ((out_a, lse_a, empty_a), (out_b, lse_b, empty_b))
    ]
    out, lse = (np.asarray(x, np.float32) for x in merge_states(*marked[0], *marked[1]))
    both, neither = merge_states(out_a, lse_a, out_b, lse_b), (np.zeros_like(out), -np.inf)
    for i, got in enumerate((out, lse)):
        cases = [(out_b, lse_b)[i], (out_a, lse_a)[i], both[i], neither[i]]
        masks = [empty_a & ~empty_b, empty_b & ~empty_a, ~empty_a & ~empty_b, empty_a & empty_b]
        for want, mask in zip(cases, masks, strict=True):
            want = np.broadcast_to(np.asarray(want, np.float32), got.shape)
            np.testing.assert_allclose(got[mask], want[mask], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_tensors_are_taken(dtype):
    torch = pytest.importorskip("torch")
    a, b = (state(seed, dtype=dtype) for seed in (0, 1))
    tensors = [torch.from_dlpack(x) for x in (*a, *b)]
    for got, want in zip(merge_states(*tensors), merge_states(*a, *b), strict=True):
        np.testing.assert_array_equal(got, want)
