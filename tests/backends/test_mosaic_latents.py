"""Latent caches on Hopper: how their work is split, on the CPU; programs up to the GPU's assembler.

On a Hopper GPU their results too, by the oracle.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from latent_items import latent_item
from mosaic_rules import BF16, hopper

from pagedattn import (
    AttentionSpec,
    explain,
    init_kv_cache,
    init_latent_cache,
    make_batch,
    paged_attention,
)
from pagedattn._dispatch.call import call_of
from pagedattn.backends.mosaic.latents import launch, pages, split_kv
from pagedattn.backends.mosaic.latents.kernel_config import KEYS, KernelConfig
from pagedattn.backends.mosaic.latents.launch import attend
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

LENGTHS = [0, 1, 15, 16, 17, 63, 64, 65, 4096, 1000]
VERIFY = [3, 2, 0, 1, 4], [70, 2, 9, 300, 129]


def config_of(num_tokens, num_seqs, *, programs=132, heads=128, **spec):
    return KernelConfig(
        num_tokens, heads, 9, 16, num_seqs, 10**4, AttentionSpec(**spec), programs=programs
    )


def schedule_of(config, query_lens, seq_lens):
    starts = np.append(0, np.cumsum(query_lens))
    lengths = jnp.asarray(starts, jnp.int32), jnp.asarray(seq_lens, jnp.int32)
    return split_kv.schedule_of(config, *lengths)


def every_item(config, schedule):
    """The work items of each part, as a program finds them, but for the steps before them."""
    parts, most = jnp.arange(config.parts), int(schedule.parts[:, 3].max())
    find = jax.vmap(partial(latent_item, config, schedule), (None, 0))
    found = np.stack(jax.jit(jax.vmap(find, (0, None)))(parts, jnp.arange(most)), axis=-1)
    return [
        [split_kv.WorkItem(*map(int, work_item)) for work_item in row[:count]]
        for row, count in zip(found, np.asarray(schedule.parts[:, 3]), strict=True)
    ]


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("programs", [4, 132])
@pytest.mark.parametrize(
    ("query_lens", "seq_lens"),
    [([1] * 10, LENGTHS), ([1], [131072]), ([1] * 64, [4096] * 64), VERIFY],
    ids=["ragged", "one", "alike", "verify"],
)
def test_each_key_is_in_one_piece(query_lens, seq_lens, programs, heads):
    """Of each token, padding too; whoever leaves sums is awaited; parts are alike."""
    num_tokens = sum(query_lens) + 3
    config = config_of(num_tokens, len(query_lens), programs=programs, heads=heads)
    schedule = schedule_of(config, query_lens, seq_lens)
    found = every_item(config, schedule)
    seen, left, awaited = np.zeros((num_tokens, 2**17), int), [], []
    for work_item in (work_item for part in found for work_item in part):
        end = min(work_item.limit, (work_item.last + 1) * KEYS)
        seen[work_item.token, max(0, (work_item.last - work_item.steps + 1) * KEYS) : end] += 1
        assert work_item.steps % config.steps_at_once == 0
        (begin, me, end) = work_item.first_part, work_item.part, work_item.last_part
        assert begin <= me <= end
        left += [(me, work_item.token)] * (me > begin)
        awaited += [(part, work_item.token) for part in range(begin + 1, end + 1) if me == begin]
    position = np.concatenate(
        [np.arange(k - q, k) for q, k in zip(query_lens, seq_lens, strict=True)]
    )
    want = np.zeros_like(seen)
    for token, last in enumerate(position):
        want[token, : last + 1] = 1
    tokens = {work_item.token for part in found for work_item in part}
    assert tokens == set(range(num_tokens))
    np.testing.assert_array_equal(np.minimum(seen, 1), want)
    assert sorted(left) == sorted(awaited)
    assert len({part for part, _ in left}) == len(left)
    steps = [sum(work_item.steps for work_item in part) for part in found]
    assert max(steps) <= max(1.2 * sum(steps) / len(steps) + 8, 64)


@pytest.mark.parametrize(("seqs", "length"), [(64, 4096), (16, 8192), (128, 1024), (33, 4096)])
@pytest.mark.parametrize("heads", [16, 128])
def test_tokens_alike_are_cut_alike(seqs, length, heads):
    """Parts have equal steps, and no part has two work items, if it does not have whole tokens."""
    config = config_of(seqs, seqs, heads=heads)
    found = every_item(config, schedule_of(config, [1] * seqs, [length] * seqs))
    for work_items in found:
        assert len(work_items) <= 1 or all(x.first_part == x.last_part for x in work_items)
    steps = {sum(x.steps for x in items) + fewer(config, items[0]) for items in filter(None, found)}
    assert len(steps) == 1


def fewer(config, x):
    """Steps that the second of two parts has less than the first, which joins their sums."""
    second = x.part == x.last_part == x.first_part + 1
    return 2 if second and config.steps_at_once == 1 else 0


@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
def test_a_part_finds_its_first_pages_beside_it(block_size):
    """They are what the table has for the keys of its first step, where a query sees them."""
    config = dataclasses.replace(config_of(10, 10, programs=4, heads=16), block_size=block_size)
    schedule = schedule_of(config, [1] * 10, LENGTHS)
    tables = np.random.default_rng(0).integers(0, 9, (10, -(-4096 // block_size)))
    config = dataclasses.replace(config, max_blocks=tables.shape[1])
    found = pages.first_blocks(config, schedule, jnp.asarray(tables, jnp.int32))
    for blocks, work_items in zip(np.asarray(found), every_item(config, schedule), strict=True):
        for page, block in enumerate(blocks):
            begin = work_items[0].last * KEYS + page * block_size
            if begin < work_items[0].limit:
                assert block == tables[work_items[0].sequence, begin // block_size]


@pytest.mark.parametrize("starts", [[-5, 30, 10**6, 7], [0, 0, 0, 0], [9, 3, 2, 1]])
def test_bad_lengths_stay_inside_the_arrays(starts):
    config = config_of(33, 3)
    seq_lens = jnp.array([10**6, -3, 2**31 - 1], jnp.int32)
    schedule = split_kv.schedule_of(config, jnp.array(starts, jnp.int32), seq_lens)
    (sequence, key_len, _), parts = np.asarray(schedule.tokens).T, np.asarray(schedule.parts)
    assert ((sequence >= 0) & (sequence < 3)).all()
    assert ((key_len >= 0) & (key_len <= config.max_blocks * config.block_size)).all()
    assert (parts[parts[:, 3] > 0, 2:4].sum(axis=1) <= 33).all()


def call_with(
    num_heads=128,
    head_dim=576,
    value_dim=512,
    block_size=16,
    dtype=jnp.bfloat16,
    cache_dtype=None,
    **spec,
):
    sizes = {"head_dim": head_dim, "value_dim": value_dim, "dtype": cache_dtype or dtype}
    sizes |= {"scales": "token"} if cache_dtype else {}
    cache = init_latent_cache(4, block_size, **sizes)
    query, batch = (
        jnp.zeros((1, num_heads, head_dim), dtype),
        make_batch([1], [0], [[1]], block_size=block_size),
    )
    return call_of(query, cache, batch, AttentionSpec(**spec))


def refusals(**sizes):
    return launch._unsupported(call_with(**sizes))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        ({"head_dim": 512, "value_dim": 256}, "columns"),
        ({"num_heads": 12}, "query heads"),
        ({"block_size": 12}, "block_size"),
        ({"block_size": 96}, "block_size"),
        ({"dtype": jnp.float16}, "float16"),
        ({"cache_dtype": "int4", "num_heads": 16}, "int4"),
        ({"sliding_window": 4}, "sliding_window"),
        ({"logits_soft_cap": 4.0}, "logits_soft_cap"),
    ],
)
def test_refusals(bad, named):
    assert refusals() == []
    (reason,) = refusals(**bad)
    assert named in reason


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"num_tokens": 15}, "little work"),
        ({"num_tokens": 512, "max_blocks": 32}, "short sequences"),
        ({"num_heads": 192}, "64 and 128 heads"),
        ({"max_query_len": 2}, "several queries"),
        ({"block_size": 8, "max_blocks": 256}, "blocks of 8"),
    ],
)
def test_what_it_is_not_fit_for(other, named):
    call = dataclasses.replace(call_with(), num_tokens=64, num_seqs=64, max_blocks=128)
    assert launch.slower_because(call) == []
    (reason,) = launch.slower_because(dataclasses.replace(call, **other))
    assert named in reason


@pytest.mark.parametrize("other", [{}, {"cache_dtype": "float8_e4m3fn", "token_scales": True}])
def test_one_sequence_of_few_heads_is_taken(other):
    call = dataclasses.replace(call_with(), num_tokens=1, num_seqs=1, max_blocks=64)
    assert launch.slower_because(dataclasses.replace(call, num_heads=16, **other)) == []


def test_one_sequence_of_many_heads_in_eight_bits_is_taken():
    """By programs of 32 heads: `triton`, which takes it from 16 bits, takes longer from these."""
    call = dataclasses.replace(call_with(), num_tokens=1, num_seqs=1, max_blocks=64, num_heads=128)
    assert launch.slower_because(call)
    bits = {"cache_dtype": "float8_e4m3fn", "token_scales": True}
    assert launch.slower_because(dataclasses.replace(call, **bits)) == []


def test_values_in_a_plane_of_their_own_are_refused():
    cache = init_kv_cache(4, 16, 1, 576, jnp.bfloat16, value_dim=512)
    query, batch = jnp.zeros((1, 64, 576), jnp.bfloat16), make_batch([1], [0], [[1]], block_size=16)
    (reason,) = launch._unsupported(call_of(query, cache, batch, AttentionSpec()))
    assert "value_dim" in reason


@pytest.mark.lowers
@pytest.mark.parametrize(
    ("heads", "block_size", "spec", "dtype"),
    [
        (128, 16, AttentionSpec(scale=0.07), "bfloat16"),
        (64, 128, AttentionSpec(scale=-0.07, causal=False), "bfloat16"),
        (8, 64, AttentionSpec(), "bfloat16"),
        (16, 16, AttentionSpec(scale=0.07), "bfloat16"),
        (96, 8, AttentionSpec(scale=-0.07), "bfloat16"),
        (16, 16, AttentionSpec(scale=0.07), "float8_e4m3fn"),
        (32, 8, AttentionSpec(scale=0.07), "int8"),
    ],
)
def test_lowers(heads, block_size, spec, dtype):
    """The call as XLA would hand it to the GPU's assembler: one kernel."""
    sizes = {"head_dim": 576, "value_dim": 512, "dtype": jnp.dtype(dtype)}
    sizes |= {} if dtype == "bfloat16" else {"scales": "token"}
    cache = init_latent_cache(9, block_size, **sizes)
    query = jnp.zeros((3, heads, 576), jnp.bfloat16)
    batch = make_batch([1, 2], [10, 0], [[2, 1], [0]], block_size=block_size)
    call = call_of(query, cache, batch, spec, return_lse=True)
    lowered = attend.trace(call, query, cache, batch, 132).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert text.count("@mosaic_gpu") == 1
    assert "output_operand_alias" in text  # its semaphores are an operand and a result


def problem_of(query_lens, seq_lens, spec=AttentionSpec(scale=192**-0.5), **sizes):
    latents = {"head_dim": 576, "value_dim": 512, "latent": True, "num_kv_heads": 1}
    sizes = latents | {"num_heads": 128, "block_size": 16, "dtype": BF16} | sizes
    return random_problem(query_lens, seq_lens, spec, **sizes)


def check(problem, programs=132):
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(query, cache, batch, problem.spec, return_lse=True)
    out, lse = attend(call, query, cache, batch, programs)
    assert_attention_close(out, lse, problem, name="mosaic")


every_tile = pytest.mark.parametrize("num_heads", [8, 16, 32, 128])


@hopper
@every_tile
@pytest.mark.parametrize("programs", [2, 6, 132])
def test_lengths(programs, num_heads):
    """With keys cut in many ways, padding, and NaN wherever no query looks."""
    sizes = {"num_heads": num_heads, "pad_tokens": len(LENGTHS) + 3}
    check(problem_of([1] * len(LENGTHS), LENGTHS, **sizes), programs)


@hopper
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        {"num_heads": 64, "block_size": 64},
        {"block_size": 8},
        {"num_heads": 16, "block_size": 128},
        {"num_heads": 96, "block_size": 32},
    ],
)
def test_several_queries(sizes, causal):
    check(problem_of(*VERIFY, AttentionSpec(causal=causal), pad_tokens=12, **sizes))


@hopper
@pytest.mark.parametrize("sizes", [{"block_size": 256}, {"num_heads": 192}, {"num_heads": 24}])
def test_sizes(sizes):
    check(problem_of([1, 1], [3000, 77], AttentionSpec(scale=-0.04), **sizes))


@hopper
@every_tile
@pytest.mark.parametrize("scale", [0.5, 0.003])
def test_tops_that_change_at_many_steps_or_at_few(scale, num_heads):
    check(problem_of([1, 1], [1500, 200], AttentionSpec(scale=scale), num_heads=num_heads))


@hopper
@every_tile
def test_one_long_sequence(num_heads):
    """In many parts, whose sums are joined in the same order each time."""
    problem = problem_of([1], [12000], num_heads=num_heads)
    check(problem)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(*arrays, problem.spec)
    out, _ = attend(call, *arrays, 132)
    assert all(jnp.array_equal(attend(call, *arrays, 132)[0], out) for _ in range(100))


@hopper
@pytest.mark.parametrize("token_scales", [True, False])
@pytest.mark.parametrize("cache_dtype", ["float8_e4m3fn", "float8_e5m2", "int8"])
@pytest.mark.parametrize("num_heads", [8, 16, 32, 128])
def test_eight_bits(num_heads, cache_dtype, token_scales):
    sizes = {"cache_dtype": cache_dtype, "num_heads": num_heads, "pad_tokens": 12}
    sizes |= {"token_scales": True} if token_scales else {}
    check_call(problem_of([1] * len(LENGTHS), LENGTHS, **sizes))
    verify = problem_of(*VERIFY, AttentionSpec(scale=0.5), block_size=64, **sizes)
    check_call(verify)
    if token_scales:
        check(verify, 6)


def check_call(problem):
    """A scale that is a number is no matter of the kernel: the call has it on queries and out."""
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    got = paged_attention(*arrays, problem.spec, backend="mosaic", return_lse=True)
    assert_attention_close(*got, problem, name="mosaic")


@hopper
def test_it_is_chosen():
    problem = problem_of([1] * 32, [4096, *[70, 0, 30] * 10, 300])
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    assert explain(*arrays, problem.spec).choice == "mosaic"
    got = paged_attention(*arrays, problem.spec, return_lse=True)
    assert_attention_close(*got, problem, name="mosaic")


@hopper
def test_bad_values_stay_inside_the_arrays():
    problem = problem_of([1, 1, 2], [900, 1, 333], poison=None)
    batch = batch_of(problem)
    wild = jnp.full_like(batch.block_tables, 2**31 - 1).at[1].set(-3)
    bad = dataclasses.replace(batch, block_tables=wild, seq_lens=jnp.full(3, 10**6, jnp.int32))
    arrays = jnp.asarray(problem.query), cache_of(problem)
    call = call_of(*arrays, bad, problem.spec, return_lse=True)
    out, _ = attend(call, *arrays, bad, 132)
    assert jnp.isfinite(out).all()
    bad = dataclasses.replace(bad, query_start_loc=jnp.array([-5, 30, 10**6, 7], jnp.int32))
    jax.block_until_ready(attend(call, *arrays, bad, 132))


def test_drafts_that_branch_are_refused():
    (reason,) = launch._unsupported(dataclasses.replace(call_with(), parents=True))
    assert reason == "parents: not with values among the keys' columns"
