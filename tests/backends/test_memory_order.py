"""The axes of JAX's arrays may lie in any order in memory: the results are the same."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from cases import MODES, SPECS, assert_close, attend_with_any_lse, mixed, run, supported
from jax.experimental.layout import Format, Layout

from pagedattn import KVCache
from pagedattn.testing import batch_of, cache_of


def lying(array, order):
    """The same array with its axes in this order in memory, outermost first."""
    return jax.device_put(array, Format(Layout(order), array.sharding))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))], ids=str)
@pytest.mark.parametrize("name", ["plain", "all"])  # a kernel for each
def test_of_a_query(backend, name, order, mode):
    problem = supported(mixed(SPECS[name]), backend)
    query = lying(jnp.asarray(problem.query), order)
    check(problem, backend, mode, query, cache_of(problem), batch_of(problem))


# Of keys and values: kernels may take one's strides for those of both.
PAIRS = {
    "heads before slots": ((0, 2, 1, 3), (0, 2, 1, 3)),
    "only the keys": ((0, 2, 1, 3), (0, 1, 2, 3)),
    "only the values": ((0, 1, 2, 3), (2, 1, 0, 3)),
    "backwards": ((3, 2, 1, 0), (3, 2, 1, 0)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PAIRS)
def test_of_a_cache(backend, name, mode):
    problem = supported(mixed(SPECS["all"]), backend)
    cache = KVCache(*map(lying, cache_of(problem).planes, PAIRS[name]))
    check(problem, backend, mode, jnp.asarray(problem.query), cache, batch_of(problem))


@pytest.mark.parametrize("mode", MODES)
def test_of_block_tables(backend, mode):
    problem = supported(mixed(SPECS["all"]), backend)
    batch = jax.tree.map(lambda array: lying(array, range(array.ndim)[::-1]), batch_of(problem))
    check(problem, backend, mode, jnp.asarray(problem.query), cache_of(problem), batch)


def check(problem, backend, mode, *arrays):
    def attend(*arrays):
        return attend_with_any_lse(*arrays, problem.spec, backend)

    got = (jax.jit(attend) if mode == "jit" else attend)(*arrays)
    assert_close(got, run(problem, backend, mode))
