"""Parents of new tokens: the lines of descent of a batch, and what is wrong with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pagedattn as pa
from pagedattn.batch.draft_tree import draft_tree
from pagedattn.masks import attention_bias, descent_mask
from pagedattn.testing.visibility import lines

SIZES = {"num_tokens": 80, "max_query_len": 70}


@st.composite
def families(draw):
    """Parents of the tokens of a few sequences, up to more of them than a word has bits."""
    lens = draw(st.lists(st.sampled_from([0, 1, 2, 5, 31, 33, 70]), max_size=4))
    lens = [n for i, n in enumerate(lens) if sum(lens[: i + 1]) <= SIZES["num_tokens"]]
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    parents = [rng.integers(-1, np.maximum(np.arange(n), 0)) for n in lens]
    return lens, np.concatenate([*parents, np.zeros(0, int)])


def spelled(tree):
    """The bits of each token as the indices that they stand for."""
    words = np.asarray(tree.ancestors).astype(np.int64) & 0xFFFFFFFF
    return [
        [32 * w + bit for w, word in enumerate(row) for bit in range(32) if word >> bit & 1]
        for row in words
    ]


@pytest.mark.parametrize("framework", ["numpy", "jax", "torch"])
@given(family=families())
def test_lines_of_descent(framework, family):
    lens, parents = family
    if framework == "torch":
        convert = pytest.importorskip("torch").from_numpy
    else:
        convert = {"numpy": np.asarray, "jax": jnp.asarray}[framework]
    starts = np.append(0, np.cumsum(lens)).astype(np.int32)
    padded = np.append(parents, np.zeros(80 - len(parents))).astype(np.int32)
    make = functools.partial(draft_tree, max_query_len=70)
    make = jax.jit(make) if framework == "jax" else make
    tree = make(convert(padded), convert(starts))
    split = np.split(parents, starts[1:-1])
    expected = [line for part in split for line in lines(len(part), part)] if lens else []
    assert np.asarray(tree.depths)[: len(parents)].tolist() == [len(x) - 1 for x in expected]
    assert spelled(tree)[: len(parents)] == [line[::-1] for line in expected]
    assert not np.asarray(tree.ancestors)[len(parents) :].any()
    assert {str(x.dtype).split(".")[-1] for x in vars(tree).values()} == {"int32"}


@given(family=families())
def test_the_pool_makes_the_batch_that_make_batch_makes(family):
    lens, parents = family
    lens = lens + [0] * (4 - len(lens))
    pool = pa.init_block_pool(40, 4, max_seqs=4, max_blocks=20)
    pool, _ = pa.append_tokens(pool, jnp.array([3, 0, 5, 1]))
    padded = jnp.append(jnp.asarray(parents, jnp.int32), jnp.full(80 - len(parents), 7))
    step = jax.jit(pa.next_batch, static_argnames=(*SIZES,))
    grown, batch, _ = step(pool, jnp.array(lens), parents=padded, **SIZES)
    want = pa.make_batch(
        lens,
        [3, 0, 5, 1],
        np.asarray(grown.block_tables),
        block_size=4,
        pad_tokens=80,
        max_query_len=70,
        parents=parents,
    )
    for name in ("slot_mapping", "positions", "query_start_loc", "seq_lens"):
        np.testing.assert_array_equal(getattr(batch, name), getattr(want, name))
    for name in vars(want.tree):
        got, expected = (np.asarray(getattr(b.tree, name)) for b in (batch, want))
        np.testing.assert_array_equal(got, expected)
    again = pa.batch_from_pool(grown, jnp.array(lens), parents=padded, **SIZES)
    np.testing.assert_array_equal(again.positions, want.positions)


def test_positions_count_depths():
    batch = pa.make_batch([3, 1], [4, 2], [[0, 1], [2]], block_size=4, parents=[-1, 0, 0, -1])
    assert batch.positions.tolist() == [4, 5, 5, 2]
    assert batch.slot_mapping.tolist() == [4, 5, 6, 10]


def test_a_chain_is_a_batch_without_parents():
    chain = pa.make_batch([3], [4], [[0, 1]], block_size=4, parents=[-1, 0, 1])
    np.testing.assert_array_equal(chain.positions, [4, 5, 6])
    rows = descent_mask(np.asarray(chain.tree.ancestors)[:3], np.arange(-4, 3))
    seen = attention_bias(np.arange(4, 7), np.arange(7), pa.AttentionSpec()) == 0
    np.testing.assert_array_equal(rows, seen)


def test_a_batch_without_room_has_its_tree_too():
    pool = pa.init_block_pool(1, 4, max_seqs=2, max_blocks=2)
    parents = jnp.array([-1, 0, -1, -1, 1])
    sizes = {"num_tokens": 5, "max_query_len": 3}
    _, batch, growth = pa.next_batch(pool, jnp.array([2, 3]), parents=parents, **sizes)
    assert growth.ok.tolist() == [True, False]
    assert batch.positions.tolist() == [0, 1, 0, 0, 0]
    assert batch.slot_mapping.tolist()[2:] == [-1, -1, -1]


def test_a_tree_may_be_wrong_inside_jit_alone():
    wrong = jnp.array([0, 5, -3, 2, 0])
    sizes = {"num_tokens": 5, "max_query_len": 5}
    pool = pa.init_block_pool(2, 4, max_seqs=1, max_blocks=2)
    step = jax.jit(pa.next_batch, static_argnames=(*sizes,))
    _, batch, _ = step(pool, jnp.array([5]), parents=wrong, **sizes)
    assert batch.tree.parents.tolist() == [-1, -1, -1, 2, 0]
    with pytest.raises(pa.InvalidInputError, match="of one before the token, or -1, got 0"):
        pa.next_batch(pool, jnp.array([5]), parents=wrong, **sizes)


WRONG = {
    "too few": ([-1, 0], "parents must have one entry for each of the 3 new tokens, got 2"),
    "itself": ([-1, 1, 0], "got 1 for the one of index 1"),
    "less than none": ([-1, 0, -2], "got -2 for the one of index 2"),
    "of floats": ([-1.0, 0.0, 0.0], "parents must be integers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_parents_are_refused(name):
    parents, text = WRONG[name]
    with pytest.raises(pa.InvalidInputError, match=text):
        pa.make_batch([3], [0], [[0]], block_size=4, parents=parents)


def test_a_tree_of_another_batch_is_refused():
    batch = pa.make_batch([3], [0], [[0]], block_size=4, parents=[-1, 0, 0])
    other = pa.make_batch([2], [0], [[0]], block_size=4, parents=[-1, 0])
    mixed_up = pa.BatchMetadata(**{**vars(batch), "tree": other.tree})
    with pytest.raises(pa.InvalidInputError, match=r"tree\.parents must be \[3\], got \[2\]"):
        pa.paged_attention(jnp.ones((3, 1, 8)), pa.init_kv_cache(1, 4, 1, 8, "float32"), mixed_up)
