"""Short queries on Hopper: how their keys are cut, on the CPU; programs up to the GPU's assembler.

On a Hopper GPU their results too, by the oracle.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SIGNED, SPECS
from mosaic_rules import BF16, hopper

from pagedattn import AttentionSpec, KVCache, make_batch
from pagedattn._dispatch.call import call_of
from pagedattn.backends.mosaic.dense import split_kv
from pagedattn.backends.mosaic.dense.kernel_config import ROWS, UNIT, UNITS, KernelConfig
from pagedattn.backends.mosaic.dense.launch import attend, config_of, slower_because
from pagedattn.backends.mosaic.dense.results import by_token
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

# query_lens, seq_lens
BATCHES = {
    "ragged": ([1] * 10, [0, 1, 15, 16, 17, 127, 128, 129, 4096, 1000]),
    "one": ([1], [9000]),
    "verify": ([8, 3, 0, 1, 4, 8], [700, 20, 9, 300, 4, 129]),
    "alike": ([8] * 12, [1024] * 12),
    "cross": ([7, 8], [3, 0]),
}
# batch, parts, query heads that share keys, padding tokens
CUTS = (
    ("ragged", 16, 4, 3),
    ("ragged", 3, 1, 70),
    ("one", 16, 4, 0),
    ("verify", 16, 7, 5),
    ("verify", 1, 4, 3),
    ("alike", 16, 4, 3),
    ("cross", 3, 16, 3),
)
cuts = pytest.mark.parametrize(("name", "parts", "group", "pad"), CUTS)
WINDOW = 1500


def sizes_of(query_lens, *, parts, group, pad):
    sizes = max(UNIT, sum(query_lens) + pad), 2 * group, 2, 128, 999, 16, len(query_lens), 600
    return KernelConfig(
        *sizes, AttentionSpec(sliding_window=WINDOW), with_lse=True, units=group, parts=parts
    )


def lengths(query_lens, seq_lens):
    starts = np.append(0, np.cumsum(query_lens))
    return jnp.asarray(starts, jnp.int32), jnp.asarray(seq_lens, jnp.int32)


schedule_in_jit = jax.jit(split_kv.schedule_of, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def all_tasks(config, starts, seq_lens):
    """How many tasks each part has for one head of keys, and these, with some to spare."""
    schedule = split_kv.schedule_of(config, starts, seq_lens)

    def of_part(part):
        tasks = split_kv.cut_tiles(
            config, (config.parts - 1 - part) * config.num_kv_heads, schedule
        )
        numbers = jnp.arange(config.max_tiles, dtype=jnp.int32)
        return tasks.count, jax.vmap(lambda i: tasks.task_of(i, tasks.look_up(i), i))(numbers)

    return jax.vmap(of_part)(jnp.arange(config.parts, dtype=jnp.int32))


@functools.cache
def tasks_of(name, parts, group, pad):
    """The config, and the tasks of every part as integers."""
    query_lens, seq_lens = BATCHES[name]
    config = sizes_of(query_lens, parts=parts, group=group, pad=pad)
    counts, tasks = jax.tree.map(np.asarray, all_tasks(config, *lengths(query_lens, seq_lens)))
    return config, [
        [jax.tree.map(lambda x, at=(part, i): int(x[at]), tasks) for i in range(count)]
        for part, count in enumerate(counts)
    ]


def rows_of(config, tile):
    """Token in its sequence and query head in its group, of the rows that hold a token."""
    units = -(-tile.query_len // UNIT) * config.group
    for row in range(config.units * UNIT):
        unit = min(tile.first_unit + row // UNIT, units - 1)
        start = min(unit // config.group * UNIT, max(tile.query_len - UNIT, 0))
        if (token := start + row % UNIT) < tile.query_len:
            yield row, token, unit % config.group


@cuts
def test_each_key_is_in_one_job(name, parts, group, pad):
    """Of each tile; the first part of a tile waits for just those which leave it their results."""
    query_lens, seq_lens = BATCHES[name]
    _, found = tasks_of(name, parts, group, pad)
    blocks, left, awaited = {}, set(), set()
    for part, tasks in enumerate(found):
        for index, (_, tile, steps, head, _, work_item) in enumerate(tasks):
            assert (head, work_item.part) == (0, part)
            assert steps.count > 0
            mine = range(steps.last - steps.count + 1, steps.last + 1)
            blocks.setdefault(tile.slot, []).extend(mine)
            if work_item.is_rest:
                assert index == 0
                left.add((tile.slot, part))
            if work_item.goes_on:
                assert not work_item.is_rest
                awaited |= {(tile.slot, other) for other in range(part + 1, work_item.last + 1)}
    assert left == awaited
    for mine in blocks.values():
        assert sorted(mine) == list(range(min(mine), max(mine) + 1))
    for sequence, (query_len, key_len) in enumerate(zip(query_lens, seq_lens, strict=True)):
        first = max(0, key_len - query_len - (WINDOW - 1)) // 128
        last = max(first, (key_len - 1) // 128)
        assert query_len == 0 or sorted(blocks[sequence]) == list(range(first, last + 1))
    steps = [sum(task.blocks.count for task in tasks) for tasks in found]
    assert max(steps) <= sum(steps) / len(steps) + len(query_lens) + 2 * split_kv.OVERHEAD


@cuts
def test_tiles_hold_every_token(name, parts, group, pad):
    """Padding too, which has no keys; lse finds its way back."""
    query_lens, seq_lens = BATCHES[name]
    config, found = tasks_of(name, parts, group, pad)
    written = np.full((config.max_tiles, 2, ROWS), np.nan, np.float32)
    seen = np.zeros((config.num_tokens, group), bool)
    for task in (task for tasks in found for task in tasks):
        tile = task.tile
        assert tile.key_len == [*seq_lens, 0][tile.sequence] or tile.query_len == 0
        for row, token, member in rows_of(config, tile):
            seen[tile.begin + token, member] = True
            written[tile.slot, :, row] = tile.begin + token + member / 32 + np.array([0, 0.5])
    assert seen.all()
    head = np.arange(2 * group)
    want = np.arange(config.num_tokens)[:, None] + head % group / 32 + head // group / 2
    in_jit = jax.jit(by_token, static_argnums=0)
    got = in_jit(config, *lengths(query_lens, seq_lens), jnp.asarray(written))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("starts", [[-5, 30, 10**6, 7], [0, 0, 0, 0], [9, 3, 2, 1], [0, 8, 16, 24]])
def test_bad_lengths_stay_inside_the_arrays(starts):
    config = sizes_of([8, 8, 8], parts=16, group=4, pad=3)
    seq_lens = jnp.array([10**6, -3, 2**31 - 1], jnp.int32)
    starts = jnp.array(starts, jnp.int32)
    tile = split_kv.tiles_of(config, starts, seq_lens)
    assert (tile.begin >= 0).all()
    assert (tile.begin + tile.query_len <= config.num_tokens).all()
    assert ((tile.key_len >= 0) & (tile.key_len <= 600 * 16)).all()
    assert (jnp.diff(split_kv.schedule_of(config, starts, seq_lens).starts) >= 0).all()


def call_for(query_len, spec, heads=(8, 2), head_dim=128, dtype=BF16):
    num_heads, num_kv_heads = heads
    plane = jnp.zeros((9, 16, num_kv_heads, head_dim), dtype)
    query = jnp.zeros((query_len + 1, num_heads, head_dim), dtype)
    batch = make_batch([query_len, 1], [20, 0], [range(2, 9), [0]], block_size=16)
    arrays = query, KVCache(plane, plane), batch
    return call_of(*arrays, spec, return_lse=True), arrays


@pytest.mark.parametrize(
    ("query_len", "heads", "units"),
    [(1, (8, 2), 4), (8, (8, 2), 4), (9, (8, 2), 8), (33, (8, 2), None), (1, (40, 2), None)],
)
def test_keys_are_cut_where_queries_fit_into_a_tile(query_len, heads, units):
    config = config_of(call_for(query_len, AttentionSpec(), heads)[0], 132)
    assert (config.units, config.parts) == ((units, 66) if units else (UNITS, 0))


@pytest.mark.parametrize(
    ("num_seqs", "kv_heads", "parts"), [(64, 4, 32), (60, 8, 15), (128, 1, 128), (40, 8, 16)]
)
def test_sequences_of_one_length_stay_whole(num_seqs, kv_heads, parts):
    """Where nearly as many parts as there are programs for have as many sequences each."""
    sizes = {"num_seqs": num_seqs, "num_heads": 4 * kv_heads, "num_kv_heads": kv_heads}
    call = call_for(1, AttentionSpec())[0]
    call = dataclasses.replace(call, max_query_len=1, num_tokens=num_seqs, max_blocks=600, **sizes)
    config = config_of(call, 132)
    assert config.parts == parts
    counts, tasks = all_tasks(config, *lengths([1] * num_seqs, [4096] * num_seqs))
    there = np.arange(tasks.index.shape[1]) < counts[:, None]
    assert bool((there & tasks.work_item.is_rest).any()) == (num_seqs % parts > 0)


@pytest.mark.parametrize(
    ("query_len", "num_seqs", "max_blocks", "fit"),
    [
        *((2, 64, 256, True), (64, 256, 64, True), (128, 1, 8, True)),
        *((2, 63, 999, False), (8, 63, 999, False), (8, 64, 255, False)),
    ],
)
def test_fit_for_several_queries_on_many_keys(query_len, num_seqs, max_blocks, fit):
    assert_fit(fit, query_len, num_seqs=num_seqs, max_blocks=max_blocks)


@pytest.mark.parametrize(
    ("num_seqs", "kv_heads", "max_blocks", "fit"),
    [
        *((64, 8, 129, True), (32, 8, 999, True), (82, 8, 999, True), (256, 1, 999, True)),
        *((64, 8, 128, False), (31, 8, 999, False), (83, 8, 999, False), (63, 4, 999, False)),
    ],
)
def test_fit_for_decodes_of_different_lengths(num_seqs, kv_heads, max_blocks, fit):
    heads = {"num_heads": 4 * kv_heads, "num_kv_heads": kv_heads}
    assert_fit(fit, 1, num_seqs=num_seqs, max_blocks=max_blocks, **heads)


def assert_fit(fit, query_len, **sizes):
    call = call_for(1, AttentionSpec())[0]
    call = dataclasses.replace(call, max_query_len=query_len, num_tokens=999, **sizes)
    reasons = slower_because(dataclasses.replace(call, return_lse=False))
    assert reasons == [] if fit else "short queries" in reasons[0]


@pytest.mark.lowers
@pytest.mark.parametrize("name", SPECS)
def test_every_feature_lowers(name):
    assert "mosaic_gpu" in lower(7, SPECS[name], heads=(4, 2))


@pytest.mark.lowers
@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype"),
    [((2, 2), 64, BF16), ((7, 1), 256, np.float16), ((16, 1), 128, BF16)],
)
def test_sizes_lower(heads, head_dim, dtype):
    assert "mosaic_gpu" in lower(8, AttentionSpec(), heads=heads, head_dim=head_dim, dtype=dtype)


def lower(query_len, spec, **sizes):
    """The call as XLA would hand it to the GPU's assembler."""
    call, arrays = call_for(query_len, spec, **sizes)
    return attend.trace(call, *arrays, 132).lower(lowering_platforms=("cuda",)).as_text()


def check(query_lens, seq_lens, spec, programs=132, **sizes):
    sizes = {"head_dim": 128, "block_size": 16, "dtype": BF16} | sizes
    problem = random_problem(query_lens, seq_lens, spec, **sizes)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(*arrays, spec, return_lse=True)
    assert config_of(call, programs).parts
    out, lse = attend(call, *arrays, programs)
    assert_attention_close(out, lse, problem, name="mosaic")


@hopper
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(("query_lens", "seq_lens"), list(BATCHES.values()), ids=list(BATCHES))
def test_every_feature(query_lens, seq_lens, name):
    """With NaN wherever no query looks, and padding."""
    check(query_lens, seq_lens, SPECS[name], pad_tokens=sum(query_lens) + 5)


@hopper
@pytest.mark.parametrize("programs", [2, 6, 40, 132])
def test_keys_cut_in_many_ways(programs):
    spec = AttentionSpec(sliding_window=3000, alibi_slopes=SIGNED)
    check([1, 8, 0, 5, 2], [5000, 300, 0, 5, 2900], spec, programs, pad_tokens=60)


@hopper
@pytest.mark.parametrize("sizes", [{"head_dim": 64}, {"head_dim": 256}, {"block_size": 128}])
@pytest.mark.parametrize("heads", [(2, 2), (7, 1), (16, 1)])
def test_sizes(heads, sizes):
    num_heads, num_kv_heads = heads
    check(*BATCHES["verify"], AttentionSpec(), num_heads=num_heads, num_kv_heads=num_kv_heads)
    check(*BATCHES["verify"], AttentionSpec(), **sizes)


@hopper
def test_two_warpgroups_of_rows():
    check([32, 1, 20], [3000, 700, 20], AttentionSpec(sliding_window=2000))


@hopper
@pytest.mark.parametrize("starts", [None, [-5, 3, 10**6, 7], [9, 3, 2, 1]])
def test_bad_values_stay_inside_the_arrays_of_a_gpu(starts):
    """And nobody waits for what nobody leaves."""
    problem = random_problem(
        [8, 1, 3],
        [900, 1, 333],
        SPECS["plain"],
        head_dim=128,
        block_size=16,
        dtype=BF16,
        poison=None,
    )
    batch = batch_of(problem)
    bad = {"block_tables": jnp.full_like(batch.block_tables, 2**31 - 1).at[1].set(-3)}
    bad["seq_lens"] = jnp.array([10**6, -3, 2**31 - 1], jnp.int32)
    if starts is not None:
        bad["query_start_loc"] = jnp.array(starts, jnp.int32)
    batch = dataclasses.replace(batch, **bad)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch
    call = call_of(*arrays, problem.spec)
    jax.block_until_ready(attend(call, *arrays, 132))
