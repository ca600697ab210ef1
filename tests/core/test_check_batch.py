"""Values out of range inside jit: `check_batch` finds each under checkify, and no other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import rows
from hypothesis import given
from jax.experimental import checkify

import pagedattn as pa
from pagedattn.testing import batch_of, cache_of
from pagedattn.testing.strategies import BUCKETS, any_phase

BUCKET = BUCKETS[0]
WINDOW = pa.AttentionSpec(sliding_window=5)
found = jax.jit(checkify.checkify(pa.check_batch))


def said(batch, cache, spec=pa.AttentionSpec()):
    """What is found, without checkify's own words behind it; None if nothing is."""
    error = found(batch, cache, spec)[0].get()
    return error and error.partition(" (`check` failed)")[0]


@given(problem=any_phase(bucket=BUCKET, dtype=np.float32, spec=pa.AttentionSpec()))
def test_nothing_is_found_in_good_batches(problem):
    for spec in (problem.spec, WINDOW):
        assert said(batch_of(problem), cache_of(problem), spec) is None


def test_padding_and_what_is_never_followed_are_good():
    """Zeros behind the starts, tables past a sequence's end, blocks behind a window."""
    batch = pa.make_batch([2, 1], [9, 0], [[3, 0, 2], [1]], block_size=4, pad_tokens=6, pad_seqs=5)
    cache = pa.init_kv_cache(4, 4, 1, 8)
    starts = batch.query_start_loc.at[3:].set(0)
    table = batch.block_tables.at[1, 1:].set(999).at[2:].set(-7)
    batch = dataclasses.replace(batch, query_start_loc=starts, block_tables=table)
    assert said(batch, cache) is None
    behind = dataclasses.replace(batch, block_tables=table.at[0, 0].set(-1))
    assert said(behind, cache, WINDOW) is None
    assert (
        said(behind, cache)
        == "block_tables must name blocks from 0 to 3: -1 of sequence 0 (entry 0)"
    )


# Name -> the field, the entry, what is wrong there, and what is said. A batch of sequences of 3 and
# 1 new tokens, of 3 and 6 keys, in blocks of 4; two of its six tokens are padding.
WRONG = {
    "a start that falls": ("query_start_loc", 1, 5, "query_start_loc must rise .* 4 at 2"),
    "a start below 0": ("query_start_loc", 0, -1, "query_start_loc must rise .* -1 at 0"),
    "a first start above 0": ("query_start_loc", 0, 1, "query_start_loc must rise .* 1 at 0"),
    "a start past the tokens": ("query_start_loc", 2, 7, "to at most 6: it has 7 at 2"),
    "a span too long": ("query_start_loc", 1, 4, "max_query_len = 3: 4 before entry 1"),
    "a length below 0": (
        "seq_lens",
        0,
        -1,
        "seq_lens must be from 0 to the 8 .*: -1 of sequence 0",
    ),
    "a length past the row": ("seq_lens", 1, 9, "seq_lens .* 9 of sequence 1"),
    "a block past the cache": ("block_tables", (1, 1), 5, "from 0 to 4: 5 of sequence 1 .entry 1"),
    "a block below 0": ("block_tables", (0, 0), -2, "from 0 to 4: -2 of sequence 0 .entry 0"),
    "no block": ("block_tables", (1, 0), -1, "from 0 to 4: -1 of sequence 1 .entry 0"),
    "a slot past the cache": ("slot_mapping", 3, 20, "from 0 to 19, or -1: 20 of token 3"),
    "a slot below -1": ("slot_mapping", 0, -2, "or -1: -2 of token 0"),
    "a slot twice": ("slot_mapping", 3, 12, "slot 12 is written by several tokens"),
}


def a_call():
    batch = pa.make_batch(
        [3, 1], [0, 5], [[3], [1, 2]], block_size=4, pad_tokens=6, max_query_len=3
    )
    return batch, pa.init_kv_cache(5, 4, 1, 8)


def spoilt(batch, name):
    field, entry, value, _ = WRONG[name]
    return dataclasses.replace(batch, **{field: getattr(batch, field).at[entry].set(value)})


@pytest.mark.parametrize("name", WRONG)
def test_each_value_out_of_range_is_found(name):
    batch, cache = a_call()
    assert said(batch, cache) is None
    error, _ = found(spoilt(batch, name), cache)
    with pytest.raises(checkify.JaxRuntimeError, match=WRONG[name][3]):
        error.throw()
    eager = {"a slot twice": "several tokens", "a span too long": "longest span"}
    with pytest.raises(pa.InvalidInputError, match=eager.get(name, WRONG[name][0])):
        pa.check_batch(spoilt(batch, name), cache)


@pytest.mark.parametrize("name", WRONG)
def test_it_is_found_in_a_whole_step_and_a_scan_of_steps(backend, name):
    if backend == "ipex":
        pytest.skip("one backend that is called through a callback is enough")
    batch, cache = a_call()
    cache = jax.tree.map(lambda plane: plane.astype(jnp.float32), cache)
    key, value = rows(6, cache)

    def step(cache, batch):
        pa.check_batch(batch, cache)
        cache = pa.write_kv(cache, key, value, batch.slot_mapping)
        return cache, pa.paged_attention(jnp.tile(key, (1, 2, 1)), cache, batch, backend=backend)

    @jax.jit
    @checkify.checkify
    def steps(cache, batches):
        return jax.lax.scan(step, cache, batches)

    good = jax.tree.map(lambda *arrays: jnp.stack(arrays), batch, batch)
    bad = jax.tree.map(lambda *arrays: jnp.stack(arrays), batch, spoilt(batch, name))
    assert steps(cache, good)[0].get() is None
    error, _ = steps(cache, bad)
    with pytest.raises(checkify.JaxRuntimeError, match=WRONG[name][3]):
        error.throw()


def test_without_checkify_nothing_is_checked_inside_jit():
    batch, cache = a_call()

    @jax.jit
    def plain(batch, cache):
        pa.check_batch(batch, cache)
        return batch.seq_lens + 1

    for name in WRONG:
        plain(spoilt(batch, name), cache)
    program = plain.lower(batch, cache).compile().as_text()
    assert "sort" not in program  # as the slots are, to find doubled ones


def test_sizes_and_specs_are_checked_while_tracing():
    batch, cache = a_call()
    other = pa.init_kv_cache(5, 8, 1, 8)
    for check in (pa.check_batch, jax.jit(pa.check_batch)):
        with pytest.raises(pa.InvalidInputError, match="blocks of 4, the cache has 8"):
            check(batch, other)
        with pytest.raises(pa.InvalidInputError, match="BatchMetadata"):
            check({"seq_lens": batch.seq_lens}, cache)
    with pytest.raises(pa.InvalidInputError, match="AttentionSpec"):
        pa.check_batch(batch, cache, 5)


def test_empty_batches_have_nothing_wrong():
    for tables in ([], [[], []]):
        lens = [0] * len(tables)
        batch = pa.make_batch(lens, lens, tables, block_size=4)
        assert said(batch, pa.init_kv_cache(0, 4, 1, 8)) is None
