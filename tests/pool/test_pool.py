"""The block pool against lists of tokens: a stateful model, with attention over what it manages."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same
from forked import run_forked
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import pagedattn as pa
from pagedattn.testing import reference_attention

MAX_SEQS, MAX_BLOCKS, BLOCK_SIZE, HEAD_DIM = 4, 3, 2, 4
CAPACITY = MAX_BLOCKS * BLOCK_SIZE
POOL_SIZE = 6  # of both sides: eager calls are compiled for each size; half of what rows can hold


def both(function, *args, **static):
    """The result under jit, which has to be the eager one."""
    eager = function(*args, **static)
    jitted = _jit(function, tuple(static.items()))(*args)
    assert_same(eager, jitted)
    return jitted


@functools.cache
def _jit(function, static):
    return jax.jit(functools.partial(function, **dict(static)))


ATTEND = jax.jit(pa.paged_attention, static_argnames=("spec", "backend"))


def i32(*values):
    return jnp.array(values, jnp.int32)


def row_vector(token):
    """A token's key and value: from a table, so that equal tokens look equal."""
    return np.random.default_rng(token).uniform(-1, 1, (2, 1, HEAD_DIM)).astype(np.float32)


class Side:
    """A pool, its cache, and the model: the tokens of each row, None where they were given back."""

    def __init__(self, num_blocks):
        sizes = {"max_seqs": MAX_SEQS, "max_blocks": MAX_BLOCKS}
        self.pool = pa.init_block_pool(num_blocks, BLOCK_SIZE, **sizes)
        empty = jnp.full((num_blocks, BLOCK_SIZE, 1, HEAD_DIM), jnp.nan)
        self.cache = pa.KVCache(empty, empty)
        self.rows = [[] for _ in range(MAX_SEQS)]
        self.held = []

    def table(self, row):
        """The entries of a row that its tokens stand in; -1 for blocks that were given back."""
        used = -(-len(self.rows[row]) // BLOCK_SIZE)
        return np.asarray(self.pool.block_tables)[row, :used].tolist()

    def blocks(self, row):
        return [block for block in self.table(row) if block >= 0]

    def forget(self, window, most):
        """Blocks of which the next query sees no token are gone, `most` of a row at once."""
        for tokens in self.rows:
            behind = [
                start
                for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE)
                if not any(len(tokens) - j < window for j in range(start, start + BLOCK_SIZE))
                and tokens[start] is not None
            ]
            for start in behind[:most]:
                tokens[start : start + BLOCK_SIZE] = [None] * BLOCK_SIZE

    def check(self):
        pool = self.pool
        assert pool.seq_lens.tolist() == [len(tokens) for tokens in self.rows]
        owners = np.zeros(pool.num_blocks, int)
        for row, tokens in enumerate(self.rows):
            gone = [token is None for token in tokens[::BLOCK_SIZE]]
            assert [block == -1 for block in self.table(row)] == gone
            np.add.at(owners, self.blocks(row), 1)
        np.add.at(owners, np.array(self.held, int), 1)
        assert pool.ref_counts.tolist() == owners.tolist()
        free = np.asarray(pool.free_blocks)[: int(pool.num_free)].tolist()
        assert sorted(free) == np.flatnonzero(owners == 0).tolist()
        self.check_contents()

    def check_contents(self):
        key, value = (np.asarray(x).reshape(-1, 1, HEAD_DIM) for x in jax.tree.leaves(self.cache))
        for row, tokens in enumerate(self.rows):
            slots = [b * BLOCK_SIZE + i for b in self.table(row) for i in range(BLOCK_SIZE)]
            for token, slot in zip(tokens, slots, strict=False):
                if token is None:
                    continue
                np.testing.assert_array_equal((key[slot], value[slot]), row_vector(token))

    def grows(self, counts):
        """What serving one row after the other would give: who grows."""
        refs, free = np.asarray(self.pool.ref_counts).copy(), int(self.pool.num_free)
        outcome, exhausted = [], False
        for row, count in enumerate(counts):
            length, table = len(self.rows[row]), self.table(row)
            if count == 0 or length + count > CAPACITY:
                outcome.append(count == 0)
                continue
            copies = length % BLOCK_SIZE != 0 and refs[table[-1]] > 1
            need = -(-(length + count) // BLOCK_SIZE) - len(table) + copies
            exhausted = exhausted or need > free
            grown = not (exhausted and need)
            if grown:
                free -= need
                refs[table[-1] if copies else 0] -= copies
            outcome.append(grown)
        return outcome


class PoolMachine(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.device, self.host, self.next_token = Side(POOL_SIZE), Side(POOL_SIZE), 0

    @rule(counts=st.tuples(*[st.sampled_from([0, 0, 1, 1, 2, 5, 7])] * MAX_SEQS))
    def append(self, counts):
        side = self.device
        expected = side.grows(counts)
        side.pool, growth = both(pa.append_tokens, side.pool, i32(*counts))
        assert growth.ok.tolist() == expected
        side.cache = both(pa.copy_blocks, side.cache, growth.copy_src, growth.copy_dst)
        written = [count * ok for count, ok in zip(counts, expected, strict=True)]
        sizes = {"num_tokens": MAX_SEQS * CAPACITY, "max_query_len": CAPACITY}
        batch = both(pa.batch_from_pool, side.pool, i32(*written), **sizes)
        rows = np.full((2, MAX_SEQS * CAPACITY, 1, HEAD_DIM), np.nan, np.float32)
        for index in range(sum(written)):
            rows[:, index] = row_vector(self.next_token + index)
        side.cache = pa.write_kv(side.cache, *jnp.asarray(rows), batch.slot_mapping)
        for row, count in enumerate(written):
            side.rows[row] += range(self.next_token, self.next_token + count)
            self.next_token += count

    @rule(parents=st.lists(st.integers(-1, MAX_SEQS - 1), min_size=2, max_size=2), data=st.data())
    def fork(self, parents, data):
        children = data.draw(st.lists(st.integers(-1, MAX_SEQS - 1), min_size=2, max_size=2))
        side, before = self.device, [list(tokens) for tokens in self.device.rows]
        expected, taken = [], set()
        for parent, child in zip(parents, children, strict=True):
            made = parent >= 0 and child >= 0 and not before[child] and child not in taken
            expected.append(made)
            if parent >= 0 and child >= 0:
                taken.add(child)
            if made:
                side.rows[child] = list(before[parent])
        side.pool, made = both(pa.fork, side.pool, i32(*parents), i32(*children))
        assert made.tolist() == expected

    @rule(rows=st.lists(st.integers(-1, MAX_SEQS - 1), min_size=2, max_size=2))
    def release(self, rows):
        side = self.device
        side.pool, freed = both(pa.release, side.pool, i32(*rows))
        self.poison(freed)
        for row in set(rows) - {-1}:
            side.rows[row] = []

    @rule(window=st.sampled_from([1, 2, 3, 9]), most=st.sampled_from([None, 1]))
    def release_behind(self, window, most):
        side, before = self.device, self.device.pool.ref_counts
        bounds = {"window": window, "max_new_tokens": most}  # one token, one block
        side.pool, freed = both(pa.release_behind, side.pool, **bounds)
        self.poison(freed)
        side.forget(window, most)
        freed = sorted(block for block in freed.ravel().tolist() if block >= 0)
        assert freed == np.flatnonzero((before > 0) & (side.pool.ref_counts == 0)).tolist()

    def poison(self, freed):
        side = self.device
        side.cache = both(pa.fill_blocks, side.cache, freed, value=jnp.nan)
        freed = [block for block in freed.ravel().tolist() if block >= 0]
        assert np.isnan(np.asarray(side.cache.key)[freed]).all()

    @rule(owner=st.integers(0, MAX_SEQS - 1), row=st.integers(0, MAX_SEQS - 1), data=st.data())
    def share_prefix(self, owner, row, data):
        side = self.device
        full = side.table(owner)[: len(side.rows[owner]) // BLOCK_SIZE]
        ends = [0, *(count + 1 for count, block in enumerate(full) if block >= 0)]
        count = data.draw(st.sampled_from(ends))
        blocks = i32(*(side.table(owner) + [-1] * MAX_BLOCKS)[:MAX_BLOCKS])
        tokens = side.rows[owner][: count * BLOCK_SIZE]
        side.pool, made = both(
            pa.share_blocks, side.pool, jnp.int32(row), blocks, i32(len(tokens))[0]
        )
        assert bool(made) == (not side.rows[row])
        if made:
            side.rows[row] = list(tokens)

    @rule(row=st.integers(0, MAX_SEQS - 1))
    def hold(self, row):
        side = self.device
        blocks = (side.table(row) + [-1] * MAX_BLOCKS)[:MAX_BLOCKS]
        side.pool = both(pa.hold_blocks, side.pool, i32(*blocks))
        side.held += side.blocks(row)

    @precondition(lambda self: self.device.held)
    @rule(data=st.data())
    def drop(self, data):
        side = self.device
        block = side.held.pop(data.draw(st.integers(0, len(side.held) - 1)))
        last = np.asarray(side.pool.ref_counts)[block] == 1
        side.pool, freed = both(pa.drop_blocks, side.pool, i32(block))
        assert freed.tolist() == [block if last else -1]

    @rule(out=st.booleans(), row=st.integers(0, MAX_SEQS - 1), other=st.integers(0, MAX_SEQS - 1))
    def swap(self, out, row, other):
        source, target = (self.device, self.host) if out else (self.host, self.device)
        tokens = source.rows[row]
        need = len(source.blocks(row))
        fits = not target.rows[other] and need <= int(target.pool.num_free)
        swap = pa.swap_out if out else pa.swap_in
        self.device.pool, self.host.pool, moved = both(
            swap, self.device.pool, self.host.pool, i32(row), i32(other)
        )
        assert moved.ok.tolist() == [fits]
        target.cache = both(pa.swap_blocks, source.cache, target.cache, moved.src, moved.dst)
        if fits:
            target.rows[other], source.rows[row] = tokens, []

    @invariant()
    def pools_and_contents_are_right(self):
        if hasattr(self, "device"):
            self.device.check()
            self.host.check()

    @rule()
    def attend(self):
        """The last token of every live sequence sees just its own, as far as it is left."""
        side = self.device
        left = [sum(token is not None for token in tokens) for tokens in side.rows]
        lens = [min(1, tokens) for tokens in left]
        gone = [n for n, tokens in zip(left, side.rows, strict=True) if n and None in tokens]
        spec = pa.AttentionSpec(sliding_window=min(gone, default=CAPACITY))
        batch = pa.batch_from_pool(side.pool, i32(*lens), num_tokens=MAX_SEQS, max_query_len=1)
        query = np.random.default_rng(self.next_token).uniform(-1, 1, (MAX_SEQS, 2, HEAD_DIM))
        query = jnp.asarray(query, jnp.float32)
        out = ATTEND(query, side.cache, batch, spec, backend="xla")
        expected, _ = reference_attention(
            *(np.asarray(x) for x in (query, side.cache.key, side.cache.value)),
            *(np.asarray(x) for x in (batch.block_tables, batch.seq_lens, batch.query_start_loc)),
            spec,
        )
        np.testing.assert_allclose(out, expected, atol=1e-5)


PoolMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
TestPool = PoolMachine.TestCase


def filled(num_blocks=4, **changes):
    sizes = {"max_seqs": 3, "max_blocks": 4, **changes}
    return pa.init_block_pool(num_blocks, 2, **sizes)


def test_a_pool_of_one_block():
    pool, growth = pa.append_tokens(filled(1), i32(2, 1, 0))
    assert growth.ok.tolist() == [True, False, True]
    pool, growth = pa.append_tokens(pool, i32(1, 0, 0))
    assert growth.ok.tolist() == [False, True, True]
    pool, _ = pa.release(pool, i32(0))
    assert int(pool.num_free) == 1


def test_a_sequence_longer_than_the_pool_or_its_row_changes_nothing():
    for count in (9, 2_000_000_000):
        before = filled()
        after, growth = pa.append_tokens(before, i32(count, 0, 0))
        assert growth.ok.tolist() == [False, True, True]
        assert_same(before, after)


def test_a_sequence_that_cannot_fit_its_row_does_not_block_the_next():
    _, growth = pa.append_tokens(filled(), i32(9, 2, 0))
    assert growth.ok.tolist() == [False, True, True]


def test_releasing_twice_frees_once():
    pool, _ = pa.append_tokens(filled(), i32(3, 0, 0))
    pool, freed = pa.release(pool, i32(0, 0))
    assert int(pool.num_free) == 4
    assert (freed[1] == -1).all()


def test_forking_an_empty_sequence_makes_an_empty_one():
    pool, made = pa.fork(filled(), i32(0), i32(1))
    assert made.tolist() == [True]
    assert pool.seq_lens.tolist() == [0, 0, 0]


def test_the_last_writer_keeps_the_block_when_all_sharers_write_at_once():
    pool, _ = pa.append_tokens(filled(3), i32(1, 0, 0))
    pool, _ = pa.fork(pool, i32(0, 0), i32(1, 2))
    pool, growth = pa.append_tokens(pool, i32(1, 1, 1))
    assert growth.ok.all()
    assert int(pool.num_free) == 0
    assert (growth.copy_src >= 0).tolist() == [True, True, False]


def test_a_block_stays_shared_when_a_sharer_finds_no_copy():
    pool, _ = pa.append_tokens(filled(1), i32(1, 0, 0))
    pool, _ = pa.fork(pool, i32(0), i32(1))
    after, growth = pa.append_tokens(pool, i32(1, 1, 0))
    assert growth.ok.tolist() == [False, False, True]
    assert_same(pool, after)


def test_require_raises_with_the_sequences():
    _, growth = pa.append_tokens(filled(1), i32(2, 1, 0))
    with pytest.raises(pa.OutOfBlocksError, match=r"sequences \[1\]"):
        growth.require()


def test_growth_traces_once_and_works_in_place():
    traces = []

    @functools.partial(jax.jit, donate_argnums=0)
    def step(pool, counts):
        traces.append(1)
        return pa.append_tokens(pool, counts, max_new_tokens=1)

    pool = filled(8)
    pointers = [x.unsafe_buffer_pointer() for x in (pool.free_blocks, pool.ref_counts)]
    for counts in ((1, 0, 0), (1, 1, 0), (0, 0, 1)):
        pool, growth = step(pool, i32(*counts))
        assert growth.ok.all()
    assert len(traces) == 1
    assert pointers == [x.unsafe_buffer_pointer() for x in (pool.free_blocks, pool.ref_counts)]


@pytest.mark.parametrize("function", [pa.append_tokens, pa.release, pa.drop_blocks])
def test_what_is_called_again_outside_jit_compiles_nothing(function, caplog):
    ids = {pa.append_tokens: i32(1, 1, 0), pa.release: i32(0), pa.drop_blocks: i32(1, -1)}[function]
    pool, _ = function(filled(), ids)
    with jax.log_compiles():
        function(pool, ids)
    assert not caplog.text


def test_more_tokens_than_the_static_bound_are_refused():
    pool, growth = pa.append_tokens(filled(), i32(3, 1, 0), max_new_tokens=2)
    assert growth.ok.tolist() == [False, True, True]
    assert pool.seq_lens.tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: pa.init_block_pool(0, 2, max_seqs=1, max_blocks=1), "num_blocks"),
        (lambda: pa.append_tokens(filled(), i32(1)), "num_tokens must have 3"),
        (lambda: pa.append_tokens(filled(), i32(1, -1, 0)), "negative"),
        (lambda: pa.append_tokens(filled(), jnp.ones(3)), "integers"),
        (lambda: pa.fork(filled(), i32(0), i32(3)), "children must name"),
        (lambda: pa.fork(filled(), i32(0), i32(1, 2)), "equally long"),
        (lambda: pa.release(filled(), i32(7)), "seqs must name"),
        (lambda: pa.share_blocks(filled(), jnp.int32(0), i32(9), i32(2)[0]), "blocks must name"),
        (
            lambda: pa.swap_out(
                filled(), pa.init_block_pool(1, 4, max_seqs=1, max_blocks=1), i32(0), i32(0)
            ),
            "block_size",
        ),
    ],
)
def test_bad_input_is_named(call, words):
    with pytest.raises(pa.InvalidInputError, match=words):
        call()


def test_unowned_blocks_cannot_be_shared():
    before = filled()
    for function in (pa.share_blocks, jax.jit(pa.share_blocks)):
        after, made = function(before, jnp.int32(0), i32(3), i32(2)[0])
        assert not made
        assert_same(before, after)


def test_dropping_what_is_not_held_frees_nothing():
    pool, _ = pa.append_tokens(filled(), i32(2, 0, 0))
    after, freed = pa.drop_blocks(pool, pool.block_tables[0, :1])
    assert freed.tolist() == [-1]
    assert_same(pool, after)


def test_numbers_beyond_int32_do_not_wrap():
    """Under x64 they can be asked for; the pool stays scannable there."""
    script = """
import jax, jax.numpy as jnp, pagedattn as pa
jax.config.update("jax_enable_x64", True)
pool = pa.init_block_pool(4, 2, max_seqs=2, max_blocks=4)
cache = pa.init_kv_cache(4, 2, 1, 1, jnp.float32)
row = jnp.ones((1, 1, 1), jnp.float32)
out = jax.jit(pa.write_kv)(cache, row, row, jnp.array([2**32 + 1]))
assert not out.key.any()
after, growth = jax.jit(pa.append_tokens)(pool, jnp.array([2**32, 1]))
assert growth.ok.tolist() == [False, True]
begin = jax.jit(pa.next_batch, static_argnames=("num_tokens", "max_query_len"))
for counts, ok in (([1, 2**32 + 1], [True, False]), ([2**33 - 1, 1], [False, False])):
    after, batch, growth = begin(pool, jnp.array(counts), num_tokens=3, max_query_len=2)
    assert growth.ok.tolist() == ok and after.seq_lens.tolist() == [int(ok[0]), 0]
ones = jnp.ones(2, jnp.int64)
def step(pool, _):
    sizes = {"num_tokens": 2, "max_query_len": 1}
    (pool,), (batch,), (growth,) = pa.next_batches([pool], ones, **sizes)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(batch)} == {"int32"}
    pool, _ = pa.release(pool, jnp.array([1]))
    pool, _ = pa.release_behind(pool, 1)
    return pool, growth.ok
pool, ok = jax.lax.scan(step, pool, length=3)
assert ok.all() and pool.seq_lens.tolist() == [3, 0]
"""
    done = run_forked(script, "jax.numpy")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("lens", "sizes", "words"),
    [
        ((3, 1), {"num_tokens": 9, "max_query_len": 9}, "append the tokens first"),
        ((1, 2), {"num_tokens": 2, "max_query_len": 2}, "num_tokens of 3"),
        ((1, 2), {"num_tokens": 9, "max_query_len": 1}, "max_query_len of 2"),
    ],
)
def test_a_batch_of_more_than_the_pool_holds_is_refused(lens, sizes, words):
    pool, _ = pa.append_tokens(filled(), i32(1, 2, 0))
    with pytest.raises(pa.InvalidInputError, match=words):
        pa.batch_from_pool(pool, i32(*lens, 0), **sizes)


def test_sizes_may_be_numpys_integers():
    """Capacities are products of them, which int8 does not hold."""
    pool = pa.init_block_pool(9, np.int8(16), max_seqs=1, max_blocks=np.int8(9))
    _, growth = pa.append_tokens(pool, jnp.array([140]))
    assert growth.ok.tolist() == [True]
