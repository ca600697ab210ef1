"""A spec is a static node of pytrees: an argument of plain `jax.jit`, alone or among arrays."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from cases import SPECS, mixed
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec, paged_attention
from pagedattn.testing import assert_attention_close, batch_of, cache_of

OTHER = AttentionSpec(sliding_window=3)


def test_it_is_an_argument_of_plain_jit():
    attend = jax.jit(lambda *args: paged_attention(*args, return_lse=True))
    for spec in SPECS.values():
        problem = mixed(spec)
        query, cache = jnp.asarray(problem.query), cache_of(problem)
        assert_attention_close(*attend(query, cache, batch_of(problem), spec), problem)


def test_a_program_is_traced_again_only_for_another_spec():
    traced = []

    @jax.jit
    def step(layers, x):
        traced.append(layers["spec"])
        return x + (layers["spec"].sliding_window or 0)

    results = [
        step({"spec": spec, "weight": jnp.ones(2)}, jnp.zeros(2))[0].item()
        for spec in (AttentionSpec(), AttentionSpec(), OTHER, AttentionSpec(sliding_window=3))
    ]
    assert results == [0, 0, 3, 3]
    assert traced == [AttentionSpec(), OTHER]


@dataclass(frozen=True, kw_only=True)
class Wider(AttentionSpec):
    sink_tokens: int | None = None


@given(spec=st.sampled_from([*SPECS.values(), Wider(sink_tokens=2), Wider(sliding_window=4)]))
def test_it_has_no_leaves_and_comes_back_as_it_was(spec):
    """Of a subclass too, as backends of others may have."""
    leaves, tree = jax.tree.flatten({"a": spec, "b": [1, spec]})
    assert leaves == [1]
    assert jax.tree.unflatten(tree, leaves) == {"a": spec, "b": [1, spec]}
    assert (tree == jax.tree.structure({"a": OTHER, "b": [1, spec]})) == (spec == OTHER)
    assert jax.jit(lambda x: x)(spec) == spec


def test_it_goes_through_scan_vmap_and_grad():
    def window(carry, _):
        spec, total = carry
        return (spec, total + spec.sliding_window), spec

    (spec, total), last = jax.lax.scan(window, (OTHER, 0), length=4)
    assert (spec, int(total), last) == (OTHER, 12, OTHER)
    shifted = jax.vmap(lambda spec, x: x + spec.sliding_window)(OTHER, jnp.arange(2))
    assert shifted.tolist() == [3, 4]
    slope = jax.grad(lambda given: given["x"] * given["spec"].sliding_window)
    np.testing.assert_array_equal(slope({"x": 2.0, "spec": OTHER})["x"], 3)
