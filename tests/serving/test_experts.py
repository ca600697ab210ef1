"""Chosen experts alone, against all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_serving.families.experts import Routed, mixture, tiles_of

pytestmark = pytest.mark.usefixtures("exact_products")
WEIGHTS = ("first", "second")


def expert(weights, x):
    return jnp.tanh(x @ weights["first"]) @ weights["second"]


def all_experts(layer, x, routed):
    """Every expert for every token, weighed by 0 where it was not chosen."""
    outputs = jax.vmap(expert, in_axes=(0, None))({name: layer[name] for name in WEIGHTS}, x)
    chosen = jax.nn.one_hot(routed.experts, len(outputs)) * routed.weights[..., None]
    return jnp.einsum("tke,eth->th", chosen, outputs)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_chosen_experts_give_what_all_of_them_give(num_tokens):
    rng = np.random.default_rng(0)
    layer = {name: rng.normal(size=(6, 12, 12)).astype(np.float32) for name in WEIGHTS}
    x = rng.normal(size=(num_tokens, 12)).astype(np.float32)
    weights = rng.normal(size=(num_tokens, 3)).astype(np.float32)
    compiled = jax.jit(mixture, static_argnames=("names", "expert"))
    for experts in (
        rng.permuted(np.tile(np.arange(6), (num_tokens, 1)), axis=1)[:, :3],
        np.tile([5, 0, 2], (num_tokens, 1)),  # the same for all: five tiles of one expert
    ):
        routed = Routed(jnp.array(experts), jnp.array(weights))
        ours = compiled(layer, x, routed, WEIGHTS, expert)
        np.testing.assert_allclose(ours, all_experts(layer, x, routed), rtol=1e-4, atol=1e-4)


def test_experts_that_nobody_chose_are_not_looked_at():
    layer = {name: jnp.ones((4, 2, 2)).at[3].set(jnp.nan) for name in WEIGHTS}
    routed = Routed(jnp.array([[0, 2], [2, 1]]), jnp.ones((2, 2)))
    assert jnp.isfinite(mixture(layer, jnp.ones((2, 2)), routed, WEIGHTS, expert)).all()


@given(st.lists(st.lists(st.integers(0, 4), min_size=2, max_size=2), min_size=5, max_size=5))
def test_a_tile_has_tokens_of_one_expert_and_a_row_has_one_token(chosen):
    tiles = tiles_of(jnp.array(chosen), num_experts=5, rows=3)
    slots, owners = np.ravel(tiles.slots), np.asarray(tiles.experts)
    assert len(set(slots)) == 10
    assert (owners[slots // 3] == np.ravel(chosen)).all()
    assert set(slots // 3) == set(range(int(tiles.count)))
