"""Every public function of JAX arrays can be part of a function that is differentiated.

Attention's own gradients are those of tests/backends/test_gradients.py.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_calls import CORE
from selection_calls import SELECTION

CALLS = {name: make for name, make in (CORE | SELECTION).items() if "attention" not in name}


def is_array(leaf):
    return isinstance(leaf, jax.Array)


def is_real(leaf):
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)


def of_reals(function, arguments):
    """The call as a function of its floating arrays, and these; it gives the results' arrays."""
    leaves, tree = jax.tree.flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if is_real(leaf)]

    def call(*numbers):
        given = dict(enumerate(leaves)) | dict(zip(places, numbers, strict=True))
        results = function(**tree.unflatten(given.values()))
        return [leaf for leaf in jax.tree.leaves(results) if is_array(leaf)]

    return call, [leaves[i] for i in places]


def cotangent(result):
    if is_real(result):
        return jnp.ones_like(result)
    return np.zeros(result.shape, jax.dtypes.float0)


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_differentiated(name):
    call, numbers = of_reals(*CALLS[name]())
    if not numbers:
        pytest.skip("it takes no floating arrays of JAX")
    wanted = call(*numbers)

    @jax.jit
    def derivatives(*numbers):
        results, pull = jax.vjp(call, *numbers)
        return results, pull([cotangent(result) for result in results])

    results, gradients = derivatives(*numbers)
    for result, other in zip(results, wanted, strict=True):
        np.testing.assert_allclose(np.float64(result), np.float64(other), rtol=1e-5, atol=1e-6)
    assert [gradient.shape for gradient in gradients] == [number.shape for number in numbers]
