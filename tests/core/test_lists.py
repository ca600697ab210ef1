"""Lists stand for arrays of integers wherever the host can read them; traced values are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_cache, rows
from public_calls import CORE

import pagedattn as pa

# The arguments of public calls that are integers of one dimension or more.
LISTED = [
    (name, argument)
    for name, call in CORE.items()
    for argument, value in call()[1].items()
    if isinstance(value, jax.Array) and value.ndim and value.dtype == jnp.int32
]


def as_numpy(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def test_the_calls_are_those_of_pools_blocks_and_starts():
    names = {name for name, _ in LISTED}
    assert names >= {
        "append_tokens",
        "fork",
        "release",
        "batch_from_pool",
        "next_batch",
        "copy_blocks",
    }
    assert names >= {"write_kv", "ragged_attention", "positions", "slot_mapping", "swap_out"}


@pytest.mark.parametrize(("name", "argument"), LISTED, ids=map(".".join, LISTED))
def test_a_list_does_what_its_array_does(name, argument):
    function, arguments = CORE[name]()
    listed = arguments | {argument: arguments[argument].tolist()}
    got, expected = as_numpy(function(**listed)), as_numpy(function(**arguments))
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype


def test_empty_lists_name_nothing():
    cache = random_cache()
    np.testing.assert_array_equal(pa.copy_blocks(cache, [], []).key, cache.key)
    pool = pa.init_block_pool(4, 2, max_seqs=2, max_blocks=2)
    assert int(pa.release(pool, [])[0].num_free) == 4


@pytest.mark.parametrize("bad", [[1.0, 0.0], [[1], 0], ["a", "b"], [True, False], [2**40, 0]])
def test_other_lists_are_refused_by_the_arguments_name(bad):
    pool = pa.init_block_pool(4, 2, max_seqs=2, max_blocks=2)
    with pytest.raises(pa.InvalidInputError, match="num_tokens"):
        pa.append_tokens(pool, bad)


def test_a_list_of_floats_is_no_query():
    function, arguments = CORE["paged_attention"]()
    with pytest.raises(pa.InvalidInputError, match="query must be an array, got list"):
        function(**arguments | {"query": arguments["query"].tolist()})


TRACED = {
    "query_lens": lambda n: pa.make_batch([n], [0], [[1]], block_size=4),
    "context_lens": lambda n: pa.make_batch([1], n[None], [[1]], block_size=4),
    "block_tables": lambda n: pa.make_batch([1], [0], [[n]], block_size=4),
    "block_size": lambda n: pa.make_batch([1], [0], [[1]], block_size=n),
    "pad_tokens": lambda n: pa.make_batch([1], [0], [[1]], block_size=4, pad_tokens=n),
    "seqs": lambda n: pa.release(pa.init_block_pool(4, 2, max_seqs=2, max_blocks=2), [n]),
}
CURES = ("next_batch", "static_argnames")


@pytest.mark.parametrize("name", TRACED)
def test_traced_values_where_the_host_must_know(name):
    with pytest.raises(pa.InvalidInputError, match=name) as error:
        jax.jit(TRACED[name])(jnp.int32(3))
    assert any(cure in str(error.value) for cure in CURES)
    assert "__array__" not in str(error.value)
    assert error.value.__cause__ is None


def test_a_batch_of_known_lengths_can_be_made_inside_jit():
    step = jax.jit(lambda x: x + pa.make_batch([3], [0], [[1]], block_size=4).positions)
    assert step(1).tolist() == [1, 2, 3]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_unlike_dtypes_are_blamed_on_the_cache(dtype):
    cache = random_cache(dtype=dtype)
    batch = pa.make_batch([2], [0], [[1]], block_size=cache.block_size)
    query = rows(2, cache)[0].astype(jnp.bfloat16)
    with pytest.raises(pa.InvalidInputError, match="init_kv_cache") as error:
        pa.paged_attention(query, cache, batch)
    assert str(jnp.dtype(dtype)) in str(error.value)
    assert "bfloat16" in str(error.value)
