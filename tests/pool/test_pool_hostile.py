"""Hostile calls of the block pool: no block is ever lost, doubled or invented.

Ids are wild and repeated, counts are absurd. Inside jit nothing can be raised, so every call has
to leave a sound pool; outside the same call either agrees or raises and says so.
"""

import functools
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import pagedattn as pa

MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, NUM_BLOCKS = 4, 3, 2, 7
CAPACITY = MAX_BLOCKS * BLOCK_SIZE
BEHIND = {w: functools.partial(pa.release_behind, window=w) for w in (1, 2, 3, 4, 2**31 - 1)}
SIZES = {"num_tokens": 9, "max_query_len": 4}
NEXT, BATCH = (functools.partial(f, **SIZES) for f in (pa.next_batch, pa.batch_from_pool))
WILD = (-(2**31), -MAX_SEQS, -2, -1, MAX_SEQS, NUM_BLOCKS, 2**31 - 1)


def ids(bound, count):
    """Lists of ids: most are in range, some are not, and repeats are likely."""
    one = st.one_of(*[st.integers(0, bound - 1)] * 3, st.sampled_from(WILD))
    return st.lists(one, min_size=count, max_size=count)


COUNTS = st.sampled_from([0, 0, 1, 1, 2, 3, 5, CAPACITY, *WILD])


def i32(values):
    return jnp.array(values, jnp.int32)


@functools.cache
def jitted(function):
    return jax.jit(function)


def call(function, *args):
    """The result under jit; outside it is the same, or an error of ours."""
    inside = jitted(function)(*args)
    try:
        outside = function(*args)
    except pa.InvalidInputError:
        return inside
    jax.tree.map(np.testing.assert_array_equal, inside, outside)
    return inside


def owned(pool, row):
    """The blocks of a row in order, -1 for those behind a window that were given back."""
    return np.asarray(pool.block_tables)[row, : int(pool.seq_blocks[row])].tolist()


def cached_slots(pool):
    """Those of all tokens that sequences have, none for those that were given back."""
    rows = [(owned(pool, row), int(pool.seq_lens[row])) for row in range(pool.max_seqs)]
    slots = [b * BLOCK_SIZE + i for bs, _ in rows for b in bs for i in range(BLOCK_SIZE)]
    held = np.concatenate([np.arange(len(bs) * BLOCK_SIZE) < n for bs, n in rows])
    return {slot for slot, of_token in zip(slots, held, strict=True) if of_token and slot >= 0}


def check_batch(batch, ok, counts):
    """Tokens keep their places within the static sizes; those of rows without room do nothing.

    Returns the slots of the others.
    """
    starts, lens = np.asarray(batch.query_start_loc), np.asarray(batch.seq_lens)
    packed = []
    for count in counts:  # what does not fit ends the batch
        if not 0 <= count <= min(batch.max_query_len, batch.num_tokens - sum(packed)):
            break
        packed.append(count)
    packed += [0] * (len(counts) - len(packed))
    assert starts.tolist() == np.cumsum([0, *packed]).tolist()
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        at = np.asarray(batch.positions[start:end]).tolist()
        assert at == list(range(lens[row] - len(at), lens[row])) if ok[row] else not any(at)
        assert ok[row] or start == end or lens[row] == 0
    rows = np.repeat(np.append(ok, False), np.append(packed, batch.num_tokens - sum(packed)))
    assert (np.asarray(batch.slot_mapping)[~rows] == -1).all()
    return np.asarray(batch.slot_mapping)[rows].tolist()


def check(pool):
    """Every block is either free, once, or owned by as many rows and holds as are counted."""
    lens, holds = np.asarray(pool.seq_lens), np.asarray(pool.hold_counts)
    assert ((lens >= 0) & (lens <= pool.max_blocks * pool.block_size)).all(), lens
    assert (holds >= 0).all(), holds
    owners = holds.copy()
    for row in range(pool.max_seqs):
        blocks = owned(pool, row)
        gone = blocks.count(-1)
        assert blocks[:gone] == [-1] * gone, f"row {row} has a hole: {blocks}"
        assert gone * pool.block_size <= lens[row], f"row {row} has nowhere to write: {blocks}"
        blocks = blocks[gone:]
        assert set(blocks) <= set(range(pool.num_blocks)), blocks
        assert len(set(blocks)) == len(blocks), f"row {row} owns a block twice: {blocks}"
        owners[blocks] += 1
    assert pool.ref_counts.tolist() == owners.tolist()
    free = np.asarray(pool.free_blocks)[: int(pool.num_free)].tolist()
    assert sorted(free) == np.flatnonzero(owners == 0).tolist()


class HostileMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        sizes = {"max_seqs": MAX_SEQS, "max_blocks": MAX_BLOCKS}
        self.pool = pa.init_block_pool(NUM_BLOCKS, BLOCK_SIZE, **sizes)
        self.host = pa.init_block_pool(3, BLOCK_SIZE, **sizes)

    def bystanders(self, before, after, rows):
        """Rows that the call does not name keep their tokens and blocks."""
        for row in set(range(MAX_SEQS)) - set(rows):
            assert owned(before, row) == owned(after, row)
            assert np.asarray(before.seq_lens)[row] == np.asarray(after.seq_lens)[row]

    @rule(counts=st.lists(COUNTS, min_size=MAX_SEQS, max_size=MAX_SEQS))
    def append(self, counts):
        before = self.pool
        self.pool, growth = call(pa.append_tokens, before, i32(counts))
        grown = np.where(growth.ok, counts, 0)
        assert (np.asarray(self.pool.seq_lens) == before.seq_lens + grown).all()
        self.bystanders(before, self.pool, np.flatnonzero(grown))
        copied = np.asarray(growth.copy_dst)[np.asarray(growth.copy_src) >= 0]
        assert (np.asarray(before.ref_counts)[copied] == 0).all()

    @rule(counts=st.lists(COUNTS, min_size=MAX_SEQS, max_size=MAX_SEQS))
    def next_batch(self, counts):
        before = self.pool
        self.pool, batch, growth = call(NEXT, before, i32(counts))
        ok = np.asarray(growth.ok)
        grown = np.where(ok, counts, 0)
        assert (np.asarray(self.pool.seq_lens) == before.seq_lens + grown).all()
        self.bystanders(before, self.pool, np.flatnonzero(grown))
        slots = check_batch(batch, ok, counts)
        assert len(set(slots) - {-1}) == len(slots)
        assert not set(slots) & cached_slots(before)

    @rule(counts=st.lists(COUNTS, min_size=MAX_SEQS, max_size=MAX_SEQS))
    def batch_from_pool(self, counts):
        """A sequence that has not so many tokens writes none; -1 is behind a window."""
        batch = call(BATCH, self.pool, i32(counts))
        has = np.asarray(self.pool.seq_lens) >= counts
        assert set(check_batch(batch, has, counts)) <= cached_slots(self.pool) | {-1}

    @rule(parents=ids(MAX_SEQS, 3), children=ids(MAX_SEQS, 3))
    def fork(self, parents, children):
        before = self.pool
        self.pool, made = call(pa.fork, before, i32(parents), i32(children))
        pairs = zip(parents, children, made.tolist(), strict=True)
        pairs = [(parent, child) for parent, child, ok in pairs if ok]
        for parent, child in pairs:
            assert owned(self.pool, child) == owned(before, parent)
        self.bystanders(before, self.pool, [child for _, child in pairs])

    @rule(seq=ids(MAX_SEQS, 1), blocks=ids(NUM_BLOCKS, MAX_BLOCKS), tokens=COUNTS)
    def share(self, seq, blocks, tokens):
        before = self.pool
        self.pool, made = call(pa.share_blocks, before, i32(seq)[0], i32(blocks), i32(tokens))
        if made:
            assert int(self.pool.seq_lens[seq[0]]) == tokens
            assert owned(self.pool, seq[0]) == blocks[: -(-tokens // BLOCK_SIZE)]
        self.bystanders(before, self.pool, seq if made else [])

    @rule(blocks=ids(NUM_BLOCKS, 3))
    def hold(self, blocks):
        before = self.pool
        self.pool = call(pa.hold_blocks, before, i32(blocks))
        owners = np.asarray(before.ref_counts)
        held = [b for b in blocks if 0 <= b < NUM_BLOCKS and owners[b] > 0]
        assert np.subtract(self.pool.hold_counts, before.hold_counts).sum() == len(held)

    @rule(blocks=ids(NUM_BLOCKS, 4))
    def drop(self, blocks):
        before = self.pool
        self.pool, freed = call(pa.drop_blocks, before, i32(blocks))
        self.gains(before, freed)

    @rule(rows=ids(MAX_SEQS, 3))
    def release(self, rows):
        before = self.pool
        self.pool, freed = call(pa.release, before, i32(rows))
        self.gains(before, freed)
        self.bystanders(before, self.pool, rows)

    @rule(window=st.sampled_from(list(BEHIND)))
    def release_behind(self, window):
        before = self.pool
        self.pool, freed = call(BEHIND[window], before)
        self.gains(before, freed)
        assert (self.pool.seq_lens == before.seq_lens).all()
        for row in range(MAX_SEQS):
            blocks, gone = owned(before, row), owned(self.pool, row).count(-1)
            assert owned(self.pool, row) == [-1] * gone + blocks[gone:]

    def gains(self, before, freed):
        """What is reported free is what became free, each block once."""
        freed = sorted(block for block in np.ravel(freed).tolist() if block >= 0)
        was, now = (np.asarray(pool.ref_counts) == 0 for pool in (before, self.pool))
        assert freed == np.flatnonzero(now & ~was).tolist()

    @rule(out=st.booleans(), rows=ids(MAX_SEQS, 2), others=ids(MAX_SEQS, 2))
    def swap(self, out, rows, others):
        swap = pa.swap_out if out else pa.swap_in
        before = sum(int(pool.seq_lens.sum()) for pool in (self.pool, self.host))
        self.pool, self.host, moved = call(swap, self.pool, self.host, i32(rows), i32(others))
        assert sum(int(pool.seq_lens.sum()) for pool in (self.pool, self.host)) == before
        assert ((moved.src >= 0) == (moved.dst >= 0)).all()

    @invariant()
    def sound(self):
        if hasattr(self, "pool"):
            check(self.pool)
            check(self.host)


HostileMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestHostilePool = HostileMachine.TestCase


def three_blocks():
    pool = pa.init_block_pool(4, 2, max_seqs=2, max_blocks=3)
    return pa.append_tokens(pool, i32([3, 0]))[0]


@pytest.mark.parametrize("function", [pa.share_blocks, jax.jit(pa.share_blocks)])
@pytest.mark.parametrize(
    ("blocks", "tokens"),
    [
        ([0, 0], 4),
        ([1, 0, 1], 6),
        ([0, 1], 5),
        ([0, 1], -3),
        ([3], 2),
        ([0, -1], 4),
        ([0, -1, 1], 6),
        ([-1], 1),
        ([-2, 0], 4),
    ],
)
def test_a_prefix_that_cannot_be_is_not_shared(function, blocks, tokens):
    """A block named twice, more tokens than the blocks hold, fewer than none, a free block, none.

    Only the first blocks may be missing: those of a row that were given back are its first.
    """
    before = three_blocks()
    try:
        after, made = function(before, 1, i32(blocks), tokens)
    except pa.InvalidInputError:
        assert function is pa.share_blocks
        return
    assert not made
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_a_block_may_be_named_twice_past_the_prefix():
    pool, made = pa.share_blocks(three_blocks(), 1, i32([0, 0, 0]), 2)
    assert made
    check(pool)
