"""Traces are counted; jit, scan and vmap agree with eager calls; donation works inside loops."""

import dataclasses
import functools

import jax
import jax.export
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import (
    BACKENDS,
    SPECS,
    assert_close,
    attend_with_any_lse,
    mixed,
    random_cache,
    rows,
    rows_of,
    run,
    supported,
)
from jax.sharding import AxisType, PartitionSpec

from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    InvalidInputError,
    KVCache,
    alibi_slopes,
    copy_blocks,
    fill_blocks,
    init_kv_cache,
    make_batch,
    paged_attention,
    positions,
    ragged_attention,
    slot_mapping,
    write_kv,
)
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

EVERYTHING = SPECS["all"]
TABLES = np.arange(24)[::-1].reshape(4, 6)  # counting downward


@pytest.fixture
def spec(backend):
    """All that a backend can do at once."""
    return supported(mixed(EVERYTHING), backend).spec


def counted(function, **options):
    """A jitted function, and the list that grows by one with every trace."""
    traces = []

    def body(*args):
        traces.append(None)
        return function(*args)

    return jax.jit(body, **options), traces


def decode_batch(context_lens):
    query_lens = [1] * len(context_lens)
    return make_batch(
        query_lens, context_lens, TABLES[: len(context_lens)], block_size=4, pad_tokens=4,
        pad_seqs=4, pad_blocks=6,
    )  # fmt: skip


def test_one_trace_for_all_decode_steps(backend):
    """Lengths, tables, batch sizes below the padding: all are values."""
    step, traces = counted(
        lambda query, cache, batch: paged_attention(
            query, cache, batch, EVERYTHING, backend=backend
        )
    )
    cache = random_cache(24, 4, 2, 16)
    query = jnp.ones((4, 4, 16))
    for context_lens in ([0, 5, 3, 9], [1, 6, 4, 10], [22, 0, 0, 1], [7, 7], [23]):
        step(query, cache, decode_batch(context_lens))
    assert len(traces) == 1


def test_one_trace_for_any_mix_in_a_bucket(backend, spec):
    """Prefill, chunk and decode of one padded shape and one bound share a program."""
    step, traces = counted(
        lambda query, cache, batch: paged_attention(query, cache, batch, spec, backend=backend)
    )
    for lens in (([8, 0, 0], [8, 0, 0]), ([5, 2, 1], [9, 20, 3]), ([1, 1, 1], [1, 2, 3])):
        tables = np.arange(18).reshape(3, 6)
        problem = random_problem(
            *lens, spec, num_blocks=18, pad_tokens=8, max_query_len=8, block_tables=tables
        )
        out = step(jnp.asarray(problem.query), cache_of(problem), batch_of(problem))
        assert_attention_close(out, None, problem)
    assert len(traces) == 1


def test_lengths_that_are_close_share_the_default_bound():
    write, traces = counted(lambda batch: batch.positions)
    for longest in (5, 6, 7, 8):
        write(make_batch([longest, 1], [0, 9], TABLES[:2], block_size=4, pad_tokens=16))
    assert len(traces) == 1


def test_equal_specs_share_a_trace(backend):
    traces = []

    @functools.partial(jax.jit, static_argnames="spec")
    def step(query, cache, batch, spec):
        traces.append(None)
        return paged_attention(query, cache, batch, spec, backend=backend)

    problem = random_problem([1, 1], [7, 9], AttentionSpec())
    args = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    step(*args, AttentionSpec(alibi_slopes=[0.5, 1, 2, 4], sliding_window=np.int64(7)))
    step(*args, AttentionSpec(alibi_slopes=np.array([0.5, 1, 2, 4]), sliding_window=7))
    assert len(traces) == 1


def test_one_trace_for_all_writes():
    write, traces = counted(write_kv)
    cache = random_cache()
    for slots in ([0, 1], [35, -1], [-1, -1]):
        cache = write(cache, *rows(2, cache), jnp.array(slots, jnp.int32))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.optimised] * (n == "all")) for n in SPECS]
)
def test_jit_is_eager(backend, name):
    problem = mixed(SPECS[name])
    assert_close(run(problem, backend, "jit"), run(problem, backend, "eager"))


def decode_inputs(num_steps, num_seqs):
    """Queries, keys and values of several decode steps."""
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (4, 16), (2, 16), (2, 16)
    return [
        jax.random.normal(key, (num_steps, num_seqs, *shape))
        for key, shape in zip(keys, shapes, strict=True)
    ]


def decode_step(backend, cache, batch, new):
    """One step: grow the sequences by a token, write, attend. Pure, so scan can carry it."""
    query, key, value = new
    seq_lens = batch.seq_lens + 1
    places = positions(batch.query_start_loc, seq_lens, len(query))
    seq_ids = jnp.arange(len(query), dtype=jnp.int32)
    slots = slot_mapping(batch.block_tables, seq_ids, places, block_size=batch.block_size)
    batch = dataclass_replace(batch, seq_lens=seq_lens, positions=places, slot_mapping=slots)
    cache = write_kv(cache, key, value, slots)
    return cache, batch, attend_with_any_lse(query, cache, batch, EVERYTHING, backend)


def dataclass_replace(batch, **fields):
    return type(batch)(**{**{n: getattr(batch, n) for n in batch.__dataclass_fields__}, **fields})


@pytest.mark.optimised
@pytest.mark.parametrize("num_steps", [7])
def test_scan_is_jit_is_eager(backend, num_steps):
    """Ten decode steps: in one scan with a donated cache, in jit and eagerly."""
    inputs = decode_inputs(num_steps, 4)
    start = [0, 5, 3, 9]
    fresh = functools.partial(random_cache, 24, 4, 2, 16)
    batch = decode_batch([n - 1 for n in [1, 6, 4, 10]])
    batch = dataclass_replace(batch, seq_lens=jnp.array(start, jnp.int32))

    def scanned(cache, batch):
        def body(carry, new):
            *carry, out = decode_step(backend, *carry, new)
            return tuple(carry), out

        (cache, _), outs = jax.lax.scan(body, (cache, batch), tuple(inputs))
        return cache, outs

    def looped(step):
        cache, state, outs = fresh(), batch, []
        for i in range(num_steps):
            cache, state, out = step(cache, state, tuple(x[i] for x in inputs))
            outs.append(out)
        return cache, jax.tree.map(lambda *results: np.stack(results), *outs)

    cache = fresh()
    pointers = [half.unsafe_buffer_pointer() for half in (cache.key, cache.value)]
    donating = jax.jit(scanned, donate_argnums=0)
    cache, outs = donating(cache, batch)
    assert [half.unsafe_buffer_pointer() for half in (cache.key, cache.value)] == pointers
    step = functools.partial(decode_step, backend)
    for other_cache, other in (looped(step), looped(jax.jit(step))):
        np.testing.assert_array_equal(cache.key, other_cache.key)
        np.testing.assert_array_equal(cache.value, other_cache.value)
        assert_close(outs, other)


def test_vmap_over_layers(backend, spec):
    """A stack of caches and queries that share one batch."""
    problems = [mixed(spec, seed=seed, poison=None) for seed in range(3)]
    batch = batch_of(problems[0])
    caches = [cache_of(problem) for problem in problems]
    stacked = KVCache(*(jnp.stack([getattr(c, n) for c in caches]) for n in ("key", "value")))
    queries = jnp.stack([jnp.asarray(problem.query) for problem in problems])

    def attend(query, cache):
        return attend_with_any_lse(query, cache, batch, spec, backend)

    results = jax.jit(jax.vmap(attend))(queries, stacked)
    for i, problem in enumerate(problems):
        table = problem.replace(block_tables=problems[0].block_tables)
        assert_close(tuple(rows_of(results, i)), run(table, backend))


def test_shard_map_over_one_axis_of_a_mesh(backend, spec):
    """The other one is left to XLA; JAX's own searchsorted asks that there is none."""
    mesh = jax.make_mesh((1, 1), ("heads", "others"), axis_types=(AxisType.Auto,) * 2)
    problem = mixed(spec)
    heads, pages = PartitionSpec(None, "heads"), PartitionSpec(None, None, "heads")

    def attend(query, cache, batch):
        return attend_with_any_lse(query, cache, batch, spec, backend)

    spread = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads, pages, PartitionSpec()),
        out_specs=heads,
        axis_names={"heads"},
    )
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    assert_attention_close(*jax.jit(spread)(*arrays), problem, name=backend)


@pytest.mark.parametrize("inside", [True, False])
def test_vmap_with_shard_map(backend, spec, inside):
    """A device has several batches, each with a cache of its own."""
    problems = [mixed(spec, seed=seed) for seed in range(2)]
    made = [(jnp.asarray(p.query), cache_of(p), batch_of(p)) for p in problems]
    arrays = jax.tree.map(lambda *xs: jnp.stack(xs), *made)

    def attend(query, cache, batch):
        return attend_with_any_lse(query, cache, batch, spec, backend)

    mesh = jax.make_mesh((1,), ("some",), axis_types=(AxisType.Auto,))
    heads, pages = PartitionSpec(None, "some"), PartitionSpec(None, None, "some")
    batches, over_heads = PartitionSpec("some"), (heads, pages, PartitionSpec())
    spread = functools.partial(jax.shard_map, mesh=mesh)
    if inside:
        both = spread(jax.vmap(attend), in_specs=batches, out_specs=batches)
    else:
        both = jax.vmap(spread(attend, in_specs=over_heads, out_specs=heads))
    results = jax.jit(both)(*arrays)
    for i, problem in enumerate(problems):
        assert_attention_close(*rows_of(results, i), problem, name=backend)


def test_vmap_of_write_kv():
    caches = [random_cache(seed=seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *caches)
    key, value = rows(2, caches[0])
    slots = jnp.array([[0, 1], [35, -1], [-1, -1]], jnp.int32)
    out = jax.vmap(write_kv, in_axes=(0, None, None, 0))(stacked, key, value, slots)
    for i, cache in enumerate(caches):
        want = write_kv(cache, key, value, slots[i])
        np.testing.assert_array_equal(out.key[i], want.key)
        np.testing.assert_array_equal(out.value[i], want.value)


def test_the_batch_can_be_built_in_jit(backend, spec):
    """The last step's batch and cache go through jit as arguments and results."""
    problem = mixed(spec)

    @jax.jit
    def step(query, cache, batch):
        return paged_attention(query, cache, batch, spec, backend=backend), cache, batch

    out, cache, batch = step(jnp.asarray(problem.query), cache_of(problem), batch_of(problem))
    assert isinstance(cache, KVCache)
    again = paged_attention(jnp.asarray(problem.query), cache, batch, spec, backend=backend)
    np.testing.assert_allclose(out, again, rtol=1e-5, atol=1e-6)


@pytest.mark.optimised
def test_write_then_attend_in_one_donating_jit(backend, spec):
    """The update aliases its input although a backend reads it right after."""
    problem = mixed(spec)
    batch = batch_of(problem)
    cache = init_kv_cache(*problem.key_cache.shape, jnp.float32)
    pointers = [half.unsafe_buffer_pointer() for half in (cache.key, cache.value)]

    @functools.partial(jax.jit, donate_argnums=0)
    def step(cache, query, key, value):
        cache = write_kv(cache, key, value, batch.slot_mapping)
        return cache, paged_attention(query, cache, batch, spec, backend=backend)

    new = rows(20, cache)
    cache, out = step(cache, jnp.nan_to_num(jnp.asarray(problem.query)), *new)
    assert [half.unsafe_buffer_pointer() for half in (cache.key, cache.value)] == pointers
    filled = problem.replace(key_cache=np.asarray(cache.key), value_cache=np.asarray(cache.value))
    assert_attention_close(out, None, filled)


def test_empty_axes(backend, mode):
    """No tokens, no sequences, no table columns."""
    for lens in (([], []), ([0], [0]), ([0, 0], [5, 0])):
        problem = random_problem(*lens, EVERYTHING, pad_tokens=3)
        out, lse = run(problem, backend, mode)
        assert not out.any()
        assert lse is None or (lse == -np.inf).all()
    out, lse = run(random_problem([0], [4], EVERYTHING), backend, mode)
    assert out.shape == (0, 4, 16)
    assert lse is None or lse.shape == (0, 4)


@pytest.mark.optimised
def test_xla_memory_grows_with_the_chunk_not_with_the_keys():
    """O(tokens x chunk): eight times the keys take no more working memory."""
    sizes = []
    for blocks in (64, 512):
        cache = init_kv_cache(blocks, 16, 2, 32, jnp.float32)
        batch = make_batch([256], [0], [range(blocks)], block_size=16)
        query = jnp.zeros((256, 8, 32))
        lowered = jax.jit(lambda *call: paged_attention(*call, backend="xla")).lower(
            query, cache, batch
        )
        sizes.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] < 1.1 * sizes[0]
    assert sizes[1] < 256 * 8 * 4096 * 4  # one row of logits for each token and head


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16, jnp.uint32, jnp.int32])
def test_metadata_of_any_integer_dtype(backend, mode, dtype):
    """The arithmetic of slots must not happen in eight bits."""
    sizes = {"block_size": 16, "num_blocks": 104, "block_tables": [[100, 99, 98], [90, 91, 92, 93]]}
    problem = random_problem([3, 1], [43, 61], SPECS["plain"], **sizes)
    batch = jax.tree.map(lambda x: x.astype(dtype), batch_of(problem))
    batch = dataclasses.replace(batch, slot_mapping=batch_of(problem).slot_mapping)
    call = functools.partial(attend_with_any_lse, backend=backend)
    call = jax.jit(call, static_argnums=3) if mode == "jit" else call
    out, lse = call(jnp.asarray(problem.query), cache_of(problem), batch, problem.spec)
    assert_attention_close(out, lse, problem)


@pytest.mark.parametrize(
    "changes",
    [
        {"query_start_loc": [0, 2**31 - 1, 2**31 - 1]},
        {"query_start_loc": [-50, -3, 4]},
        {"seq_lens": [200, 2**30]},
        {"seq_lens": [2**31 - 1, 2**31 - 1]},
    ],
)
def test_lengths_that_only_the_device_knows_are_harmless(backend, changes):
    """Whatever they are, the call ends, and touches nothing outside the arrays."""
    problem = random_problem([3, 1], [43, 61], SPECS["sliding_window"])
    changed = {name: jnp.array(values, jnp.int32) for name, values in changes.items()}
    batch = dataclasses.replace(batch_of(problem), **changed)
    call = jax.jit(functools.partial(paged_attention, backend=backend), static_argnums=3)
    out = call(jnp.asarray(problem.query), cache_of(problem), batch, problem.spec)
    assert out.shape == problem.query.shape


def test_strict_promotion(backend, spec):
    with jax.numpy_dtype_promotion("strict"):
        problem = random_problem([3, 1], [43, 61], spec, dtype=ml_dtypes.bfloat16)
        assert_attention_close(*run(problem, backend), problem)


def test_no_query_at_all_is_no_division_by_zero(backend):
    x, starts = jnp.ones((3, 1, 8)), jnp.array([0, 0])
    lens = {"max_query_len": 0, "max_key_len": 3}
    out = ragged_attention(x, x, x, starts, jnp.array([0, 3]), backend=backend, **lens)
    assert not out.any()


def struct(*shape, dtype=jnp.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize("unknown", ["num_tokens", "num_blocks", "num_seqs", "max_blocks"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_symbolic_sizes_are_refused_by_name(backend, unknown):
    """Those of `jax.export`, whatever is called with them."""
    sizes = {"num_tokens": 11, "num_blocks": 9, "num_seqs": 4, "max_blocks": 3}
    sizes[unknown] = jax.export.symbolic_shape("n")[0]
    tokens, blocks, seqs, columns = sizes.values()
    lens, starts, slots = struct(seqs), struct(seqs + 1), struct(tokens)
    fields = {"block_size": 4, "max_query_len": 8}
    batch = BatchMetadata(struct(seqs, columns), lens, starts, slots, slots, **fields)
    cache = KVCache(*[struct(blocks, 4, 2, 16, dtype=jnp.float32)] * 2)
    query, rows = (struct(tokens, heads, 16, dtype=jnp.float32) for heads in (4, 2))

    def attend_packed(query, rows, starts):
        bounds = {"max_query_len": 8, "max_key_len": 8}
        return ragged_attention(query, rows, rows, starts, starts, backend=backend, **bounds)

    attend = functools.partial(paged_attention, backend=backend)
    calls = [(attend, query, cache, batch)]
    if unknown in ("num_tokens", "num_blocks"):
        calls.append((write_kv, cache, rows, rows, slots))
    if unknown in ("num_tokens", "num_seqs"):
        calls.append((attend_packed, query, rows, starts))
    if unknown in ("num_blocks", "num_seqs"):
        calls += [(copy_blocks, cache, lens, lens), (fill_blocks, cache, lens)]
    for call in calls:
        with pytest.raises(InvalidInputError, match="sizes that are known"):
            jax.eval_shape(*call)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", 1.0), ("causal", True), ("sliding_window", 3), ("logits_soft_cap", 2.0),
        ("alibi_slopes", (0.5, 0.25)), ("return_lse", True), ("max_query_len", 4),
        ("block_size", 4), ("num_heads", 2),
    ],
)  # fmt: skip
def test_what_must_be_static_says_so(name, value):
    """In a transformation its value is unknown: the error says so, and what helps."""
    x, starts = jnp.ones((3, 2, 8)), jnp.array([0, 3])
    ragged = functools.partial(ragged_attention, x, x, x, starts, starts, max_key_len=4)
    calls = {
        "return_lse": functools.partial(ragged, max_query_len=4),
        "max_query_len": ragged,
        "block_size": functools.partial(slot_mapping, TABLES, starts, starts),
        "num_heads": alibi_slopes,
    }
    with pytest.raises(InvalidInputError, match=f"{name} must be known .* static_argnames"):
        jax.jit(lambda value: calls.get(name, AttentionSpec)(**{name: value}))(value)


def test_programs_of_xla_are_exported():
    """Records are taken apart, since jax.export writes no types that it does not know."""
    problem = mixed(EVERYTHING)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    leaves, treedef = jax.tree.flatten(arrays)

    @jax.jit
    def attend(*leaves):
        arrays = jax.tree.unflatten(treedef, leaves)
        return paged_attention(*arrays, problem.spec, backend="xla", return_lse=True)

    assert_attention_close(*jax.export.export(attend)(*leaves).call(*leaves), problem)
