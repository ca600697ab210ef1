"""make_batch and the index arithmetic against loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import BatchMetadata, InvalidInputError, make_batch, positions, slot_mapping
from pagedattn.testing import batch_of
from pagedattn.testing.strategies import BUCKETS, problems

ARRAYS = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "positions")


def loops(query_lens, context_lens, tables, block_size):
    """query_start_loc, slot_mapping and positions of the real tokens, one by one."""
    starts, slots, places = [0], [], []
    for query_len, context_len, table in zip(query_lens, context_lens, tables, strict=True):
        for i in range(query_len):
            p = context_len + i
            places.append(p)
            slots.append(int(table[p // block_size]) * block_size + p % block_size)
        starts.append(starts[-1] + query_len)
    return starts, slots, places


def padded(values, length, fill):
    return [*values, *[fill] * (length - len(values))]


@given(problem=problems(share=False, poison=False), data=st.data())
def test_matches_loops(problem, data):
    """Every array, padded: slots -1, positions 0, empty sequences, rows of any content."""
    extra = data.draw(st.integers(0, 3), label="padding")
    lens, tables, size = problem.query_lens, problem.block_tables, problem.block_size
    batch = make_batch(
        lens,
        problem.context_lens,
        tables,
        block_size=size,
        pad_tokens=sum(lens) + extra,
        pad_seqs=len(lens) + extra,
        pad_blocks=tables.shape[1] + extra,
    )
    starts, slots, places = loops(lens, problem.context_lens, tables, size)
    num_tokens, num_seqs = sum(lens) + extra, len(lens) + extra
    assert batch.query_start_loc.tolist() == padded(starts, num_seqs + 1, sum(lens))
    assert batch.seq_lens.tolist() == padded(problem.seq_lens, num_seqs, 0)
    assert batch.slot_mapping.tolist() == padded(slots, num_tokens, -1)
    assert batch.positions.tolist() == padded(places, num_tokens, 0)
    assert batch.block_tables.shape == (num_seqs, tables.shape[1] + extra)
    for s, seq_len in enumerate(problem.seq_lens):
        used = -(-seq_len // size)
        assert batch.block_tables[s, :used].tolist() == tables[s][:used].tolist()


@given(problem=problems(share=False, poison=False))
def test_index_functions_agree_with_make_batch(problem):
    """`positions` and `slot_mapping`, in jit, from nothing but the batch's tables and lengths.

    Drafts that branch have the same slots; their positions follow from a tree as well.
    """
    batch = batch_of(problem.replace(parents=None))
    np.testing.assert_array_equal(batch_of(problem).slot_mapping, batch.slot_mapping)
    tokens = np.arange(len(problem.query))
    owner = np.repeat(np.arange(len(problem.query_lens)), problem.query_lens)
    seq_ids = np.concatenate([owner, np.full(len(tokens) - len(owner), -1)]).astype(np.int32)
    got = jax.jit(positions, static_argnums=2)(batch.query_start_loc, batch.seq_lens, len(tokens))
    np.testing.assert_array_equal(got, batch.positions)
    slots = jax.jit(slot_mapping, static_argnames="block_size")(
        batch.block_tables, jnp.asarray(seq_ids), got, block_size=problem.block_size
    )
    np.testing.assert_array_equal(slots, batch.slot_mapping)
    assert slots.dtype == got.dtype == jnp.int32


def test_by_hand():
    """Prefill of 3 over two blocks of 2, and a decode at position 4."""
    batch = make_batch([3, 0, 1], [0, 0, 4], [[5, 7], [], [9, 1, 4]], block_size=2, pad_tokens=5)
    assert batch.query_start_loc.tolist() == [0, 3, 3, 4]
    assert batch.seq_lens.tolist() == [3, 0, 5]
    assert batch.slot_mapping.tolist() == [10, 11, 14, 8, -1]
    assert batch.positions.tolist() == [0, 1, 2, 4, 0]
    assert batch.block_tables[0, :2].tolist() == [5, 7]
    assert batch.block_tables[2].tolist() == [9, 1, 4]


def test_arrays_are_int32_on_the_default_device():
    batch = make_batch(np.array([2], np.int64), np.array([1]), np.array([[3]]), block_size=4)
    for name in ARRAYS:
        array = getattr(batch, name)
        assert isinstance(array, jax.Array), name
        assert array.dtype == jnp.int32, name
        assert array.devices() == jnp.zeros(1).devices(), name


def test_accepts_lists_tuples_numpy_and_jax():
    want = make_batch([2, 1], [1, 4], [[3, 5], [0, 2]], block_size=4)
    for convert in (tuple, np.array, jnp.array):
        got = make_batch(
            convert([2, 1]), convert([1, 4]), convert([[3, 5], [0, 2]]), block_size=np.int32(4)
        )
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


def test_is_a_pytree_of_five_arrays_with_static_sizes():
    batch = make_batch([2], [1], [[3]], block_size=4, max_query_len=8)
    leaves, tree = jax.tree.flatten(batch)
    assert len(leaves) == 5
    assert isinstance(tree.unflatten(leaves), BatchMetadata)
    assert tree.unflatten([None] * 5).block_size == 4
    assert tree.unflatten([None] * 5).max_query_len == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.block_size = 5


@pytest.mark.parametrize(("longest", "bound"), [(0, 1), (1, 1), (2, 2), (3, 4), (17, 32)])
def test_default_bound_is_a_power_of_two(longest, bound):
    batch = make_batch([longest, 0], [0, 0], [range(9), []], block_size=2)
    assert batch.max_query_len == bound


def test_structure_does_not_depend_on_lengths():
    def structure(query_lens, context_lens):
        batch = make_batch(
            query_lens, context_lens, np.arange(12).reshape(3, 4), block_size=4, pad_tokens=8
        )
        return jax.tree.structure(batch), [leaf.shape for leaf in jax.tree.leaves(batch)]

    assert structure([1, 1, 1], [0, 5, 9]) == structure([1, 0, 1], [15, 0, 3])
    assert structure([4, 1, 0], [0, 5, 9]) == structure([3, 1, 1], [1, 1, 1])


def test_cross_attention_takes_the_key_lengths():
    batch = make_batch([3, 1], None, [[4], [2, 6]], block_size=4, key_lens=[2, 7])
    assert batch.seq_lens.tolist() == [2, 7]
    assert batch.query_start_loc.tolist() == [0, 3, 4]
    assert batch.slot_mapping.tolist() == [-1] * 4  # its queries bring no keys
    assert batch.positions.tolist() == [-1, 0, 1, 6]  # bottom-right: context_len is -1 and 6


@pytest.mark.parametrize("given", [{}, {"context_lens": [1], "key_lens": [2]}])
def test_lengths_are_given_once(given):
    lens = {"context_lens": None, **given}
    with pytest.raises(InvalidInputError, match="context_lens or key_lens"):
        make_batch([1], block_tables=[[0]], block_size=4, **lens)


def test_empty_batch():
    batch = make_batch([], [], [], block_size=4, pad_tokens=3, pad_seqs=2, pad_blocks=5)
    assert batch.query_start_loc.tolist() == [0, 0, 0]
    assert batch.seq_lens.tolist() == [0, 0]
    assert batch.slot_mapping.tolist() == [-1] * 3
    assert batch.block_tables.shape == (2, 5)


def test_shared_blocks_that_nobody_writes_are_legal():
    batch = make_batch([1, 1], [4, 4], [[7, 1], [7, 2]], block_size=4)
    assert batch.slot_mapping.tolist() == [4, 8]


def test_unused_entries_may_hold_anything():
    tables = np.array([[3, -1, 10**6], [-7, -7, -7]])
    batch = make_batch([2, 0], [0, 0], tables, block_size=4)
    assert batch.slot_mapping.tolist() == [12, 13]


@pytest.mark.parametrize("size", [1, 3, 16, 96, 128])
def test_slots_at_block_edges(size):
    """The token before, at and after a block's edge, by // and %."""
    table = np.array([[7, 2, 5]], np.int32)
    places = np.array([size - 1, size, size + 1 if size > 1 else 2], np.int32)
    slots = slot_mapping(table, np.zeros(3, np.int32), places, block_size=size)
    assert slots.tolist() == [int(table[0, p // size]) * size + p % size for p in places]


def test_every_bucket_holds_its_longest_sequences():
    for bucket in BUCKETS:
        assert bucket.num_seqs * bucket.max_blocks <= bucket.num_blocks


def test_positions_outside_the_table_have_no_slot():
    """Also in jit, where nobody can raise: before the first token and past the last column."""
    table = jnp.array([[7, 2]], jnp.int32)
    places = jnp.array([-1, 0, 7, 8, 2**30], jnp.int32)
    find = jax.jit(slot_mapping, static_argnames="block_size")
    slots = find(table, jnp.zeros(5, jnp.int32), places, block_size=4)
    assert slots.tolist() == [-1, 28, 11, -1, -1]


@pytest.mark.parametrize("size", [1, 4])
def test_entries_without_a_block_have_no_slots(size):
    """As `release_behind` leaves them."""
    table = np.array([[-1, 2, -1, 5]])
    places = np.arange(4 * size)
    slots = slot_mapping(table, np.zeros_like(places), places, block_size=size)
    want = np.where(
        np.repeat(table[0], size) < 0, -1, np.repeat(table[0], size) * size + places % size
    )
    assert slots.tolist() == want.tolist()


def padded_with_zeros(starts, extra):
    """As engines for TPUs give them: zeros behind the last sequence."""
    return np.concatenate([starts, np.zeros(extra, starts.dtype)])


@given(problem=problems(poison=False), extra=st.integers(1, 3))
def test_positions_of_starts_that_are_padded_with_zeros(problem, extra):
    starts = problem.query_start_loc.astype(np.int32)
    seq_lens = np.array([*problem.seq_lens, *[0] * extra], np.int32)
    want = positions(starts, seq_lens[: len(starts) - 1], len(problem.query))
    for function in (positions, jax.jit(positions, static_argnums=2)):
        got = function(padded_with_zeros(starts, extra), seq_lens, len(problem.query))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("starts", [[0, 3, 2, 4], [0, 3, 0, 4], [1, 2, 3, 4], [0, -1, 2, 3]])
def test_starts_that_fall_are_refused(starts):
    with pytest.raises(InvalidInputError, match="query_start_loc must rise"):
        positions(np.array(starts), np.array([4, 4, 4]), 4)


def test_written_tokens_may_be_attended_by_two_sequences_on_one_block():
    """Their last block is shared and not full, which no batch that writes may do."""
    tables = [[4, 7], [4, 7]]
    with pytest.raises(InvalidInputError, match="key_lens"):
        make_batch([1, 1], [5, 5], tables, block_size=4)
    batch = make_batch([1, 1], None, tables, key_lens=[6, 6], block_size=4)
    assert batch.slot_mapping.tolist() == [-1, -1]
    assert batch.positions.tolist() == [5, 5]
