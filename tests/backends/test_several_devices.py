"""Several devices by `jax.shard_map`: heads or sequences spread over the axis of a mesh.

Tensor parallel: shard the head axes of the query, the keys and the cache; replicate the batch. With
ALiBi every device needs the slopes of its own heads, which are static: see `test_alibi`.
Data parallel: give every device a cache and a batch of its own, as leaves stacked on a new axis.
Nothing needs `check_vma=False`: what a backend gives is known to vary as its arguments do.
Without shard_map XLA would gather all heads on every device: it cannot split foreign kernels.
"""

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import BACKENDS, SPECS, mixed, rows, run
from jax.sharding import NamedSharding, PartitionSpec

from pagedattn import AttentionSpec, KVCache, copy_blocks, paged_attention, swap_blocks, write_kv
from pagedattn._dispatch.registry import can_load
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

DEVICES = jax.device_count()
MESH = jax.make_mesh((DEVICES,), ("device",))
STACKED, EVERYWHERE = PartitionSpec("device"), PartitionSpec()
HEADS, PAGES = PartitionSpec(None, "device"), PartitionSpec(None, None, "device")
SIZES = {"num_heads": 4 * DEVICES, "num_kv_heads": 2 * DEVICES}
LONG = {"dtype": np.dtype("float16"), "head_dim": 64, "block_size": 16, "num_blocks": 320}

several = pytest.mark.skipif(DEVICES < 2, reason="needs two devices")
on_cpu = pytest.mark.skipif(
    DEVICES > 1 or jax.default_backend() != "cpu", reason="the tests themselves run here, or cannot"
)
with_cudnn = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not can_load("cudnn"), reason="needs NVIDIA GPUs"
)


@pytest.mark.early
@on_cpu
def test_in_a_process_of_two_devices():
    """How many devices a CPU is must be said before JAX starts."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, __file__]
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def put(tree, spec):
    return jax.device_put(tree, NamedSharding(MESH, spec))


def over_heads(fn, *, check_vma=True, outs=HEADS):
    """A function of query, cache and batch, each device with some of the heads."""
    specs = (HEADS, PAGES, EVERYWHERE)
    return jax.shard_map(fn, mesh=MESH, in_specs=specs, out_specs=outs, check_vma=check_vma)


def over_stacks(fn, *, check_vma=True):
    """A function of any arguments, each device with one of those stacked."""

    def alone(*arguments):
        results = fn(*jax.tree.map(lambda leaf: leaf[0], arguments))
        return jax.tree.map(lambda leaf: leaf[None], results)

    return jax.shard_map(alone, mesh=MESH, in_specs=STACKED, out_specs=STACKED, check_vma=check_vma)


def arguments(problem):
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem)


def shared(problem):
    return tuple(map(put, arguments(problem), (HEADS, PAGES, EVERYWHERE)))


def stacked(problems):
    leaves = zip(*map(jax.tree.leaves, map(arguments, problems)), strict=True)
    treedef = jax.tree.structure(arguments(problems[0]))
    return put(jax.tree.unflatten(treedef, map(jnp.stack, leaves)), STACKED)


def attention(backend, spec):
    def attend(query, cache, batch):
        return paged_attention(query, cache, batch, spec, backend=backend, return_lse=True)

    return attend


def assert_tensor_parallel(problem, backend, check_vma=True):
    attend = over_heads(attention(backend, problem.spec), check_vma=check_vma)
    got = jax.jit(attend)(*shared(problem))
    assert [len(part.sharding.device_set) for part in got] == [DEVICES] * 2
    assert_attention_close(*map(np.asarray, got), problem)
    return got


def assert_data_parallel(problems, backend, check_vma=True):
    attend = over_stacks(attention(backend, problems[0].spec), check_vma=check_vma)
    got = map(np.asarray, jax.jit(attend)(*stacked(problems)))
    for out, lse, problem in zip(*got, problems, strict=True):
        assert_attention_close(out, lse, problem)


@several
@pytest.mark.parametrize(
    ("name", "check_vma"),
    [(n, True) for n in ("plain", "sliding_window", "logits_soft_cap", "causal=False")]
    + [("plain", False)],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_tensor_parallel(backend, name, check_vma):
    problem = mixed(SPECS[name], **SIZES)
    got = assert_tensor_parallel(problem, backend, check_vma)
    for part, want in zip(got, run(problem, backend), strict=True):
        np.testing.assert_allclose(part, want, rtol=1e-5, atol=1e-6)


@several
@pytest.mark.parametrize(("name", "check_vma"), [("plain", True), ("all", True), ("all", False)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_data_parallel(backend, name, check_vma):
    sizes = {"num_blocks": 40, "pad_tokens": 20, "max_query_len": 16, "block_tables": None}
    lens = [([6, 7, 1, 4], [6, 19, 22, 5]), ([1, 2, 9, 1], [7, 24, 9, 21])]
    problems = [random_problem(*lens[i % 2], SPECS[name], **sizes, seed=i) for i in range(DEVICES)]
    assert_data_parallel([with_wide_tables(p) for p in problems], backend, check_vma)


def with_wide_tables(problem):
    """The problem with rows of six blocks: what is stacked must be of one shape."""
    tables = np.full((len(problem.seq_lens), 6), -1)
    for row, ids in zip(tables, problem.block_tables, strict=True):
        row[: len(ids)] = ids
    return problem.replace(block_tables=tables)


@several
@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_step_in_place(backend):
    """Written to the donated cache of every device, then attended to."""
    problem = random_problem([1, 1, 1], [9, 4, 17], AttentionSpec(), **SIZES)
    query, cache, batch = shared(problem)
    new = tuple(put(plane, HEADS) for plane in rows(3, cache))

    def step(query, cache, batch, key, value):
        cache = write_kv(cache, key, value, batch.slot_mapping)
        return paged_attention(query, cache, batch, backend=backend), cache

    want, want_cache = step(*arguments(problem), *rows(3, cache))
    many = jax.shard_map(
        step, mesh=MESH, in_specs=(HEADS, PAGES, EVERYWHERE, HEADS, HEADS), out_specs=(HEADS, PAGES)
    )
    before = pointers(cache)
    got, cache = jax.jit(many, donate_argnums=1)(query, cache, batch, *new)
    assert pointers(cache) == before
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    jax.tree.map(np.testing.assert_array_equal, cache, want_cache)


def pointers(tree):
    leaves = jax.tree.leaves(tree)
    return [s.data.unsafe_buffer_pointer() for leaf in leaves for s in leaf.addressable_shards]


@several
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_device_writes_its_own_cache_in_place(dtype):
    shape = DEVICES, 9, 4, 2, 8
    cache = put(KVCache(*(jnp.zeros(shape, dtype) for _ in range(2))), STACKED)
    key = put(jnp.arange(1, DEVICES + 1, dtype=dtype)[:, None, None, None].repeat(8, 3), STACKED)
    key = key.repeat(2, 2)
    slots = put(jnp.arange(DEVICES, dtype=jnp.int32)[:, None] * 5, STACKED)
    before = pointers(cache)
    cache = jax.jit(over_stacks(write_kv), donate_argnums=0)(cache, key, key, slots)
    assert pointers(cache) == before
    want = np.zeros(shape, np.float32)
    for i in range(DEVICES):
        want[i].reshape(-1, 2, 8)[5 * i] = i + 1
    np.testing.assert_array_equal(np.asarray(cache.key, np.float32), want)
    np.testing.assert_array_equal(np.asarray(cache.value, np.float32), want)


@several
@pytest.mark.parametrize("backend", BACKENDS)
def test_outside_jit_results_lie_with_their_arguments(backend):
    """On another device than the first, and on several, where XLA gathers what a kernel needs."""
    problem = mixed(AttentionSpec(sliding_window=6, logits_soft_cap=5.0), **SIZES)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    last = jax.devices()[-1]
    for placed in (jax.device_put(arrays, last), (*put(arrays[:2], EVERYWHERE), arrays[2])):
        sinks = jax.device_put(jnp.zeros(problem.query.shape[1]), placed[0].sharding)
        options = {"backend": backend, "return_lse": True, "sinks": sinks}
        out, lse = paged_attention(*placed, problem.spec, **options)
        assert out.devices() == lse.devices() == placed[0].devices()
        assert_attention_close(out, lse, problem.replace(sinks=np.asarray(sinks)), name=backend)


@several
def test_blocks_of_spread_caches_are_copied():
    """Outside jit, where block ids lie on one device and the cache on all, by heads."""
    here = KVCache(*jax.random.normal(jax.random.key(0), (2, 6, 4, 2 * DEVICES, 8)))
    spread, src, dst = put(here, PAGES), jnp.array([0, 5, -1]), jnp.array([2, 0, 1])
    want = copy_blocks(here, src, dst)
    jax.tree.map(np.testing.assert_array_equal, copy_blocks(spread, src, dst), want)
    for to, of in ((spread, here), (here, spread)):
        jax.tree.map(np.testing.assert_array_equal, swap_blocks(of, to, src, dst), want)


@several
@pytest.mark.parametrize("backend", BACKENDS)
def test_alibi(backend):
    """A device takes the spec of its heads."""
    slopes = tuple(0.5**h for h in range(4 * DEVICES))
    problem = mixed(AttentionSpec(alibi_slopes=slopes), **SIZES)
    specs = [AttentionSpec(alibi_slopes=slopes[4 * i : 4 * i + 4]) for i in range(DEVICES)]

    def attend(*arrays):
        ways = [attention(backend, spec) for spec in specs]
        return jax.lax.switch(jax.lax.axis_index("device"), ways, *arrays)

    got = jax.jit(over_heads(attend))(*shared(problem))
    assert_attention_close(*map(np.asarray, got), problem)


@several
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_and_gradients(backend, check_vma):
    """A scan whose carry is what the last layer gave; the batch's gradient is nobody's."""
    problem = layered()
    many = over_heads(functools.partial(layers, backend), check_vma=check_vma)
    got = gradients(many, *shared(problem))
    want = gradients_on_one_device()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), got, want)


LAYERED = SPECS["sliding_window"]


def layered():
    """A decode step: its gradients are half as long to compile as those of longer queries."""
    return random_problem([1, 1, 0, 1], [9, 17, 3, 20], LAYERED, **SIZES, poison=None)


def layers(backend, query, cache, batch):
    attend = attention(backend, LAYERED)
    scales = jnp.array([1.0, 0.5])
    return jax.lax.scan(lambda x, s: (attend(x * s, cache, batch)[0], None), query, scales)[0]


def gradients(attend, *arrays):
    def loss(query, cache, batch):
        return (attend(query, cache, batch) ** 2).sum()

    return jax.jit(jax.grad(loss, (0, 1)))(*arrays)


@functools.cache  # the program takes seconds to compile
def gradients_on_one_device():
    problem = layered()
    return gradients(functools.partial(layers, "xla"), *arguments(problem))


@several
@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_spread_over_the_devices(backend):
    """Every device has part of the keys for all queries: results vary though the query does not."""
    problem = random_problem([3, 1], [9, 4], AttentionSpec(causal=False), poison=None)
    query, cache, batch = arguments(problem)
    caches = jax.tree.map(lambda plane: put(jnp.stack([plane] * DEVICES), STACKED), cache)

    def attend(query, cache, batch):
        cache = jax.tree.map(lambda plane: plane[0], cache)
        out, lse = attention(backend, problem.spec)(query, cache, batch)
        return out[None], lse[None]

    specs = (EVERYWHERE, STACKED, EVERYWHERE)
    many = jax.shard_map(attend, mesh=MESH, in_specs=specs, out_specs=STACKED)
    got = jax.jit(many)(put(query, EVERYWHERE), caches, put(batch, EVERYWHERE))
    for out, lse in zip(*map(np.asarray, got), strict=True):
        assert_attention_close(out, lse, problem)


@several
@with_cudnn
@pytest.mark.parametrize("context", [0, 100])
def test_cudnn_on_long_prompts(context):
    lens = [2048, 2000]
    sizes = LONG | {"num_heads": 4 * DEVICES, "num_kv_heads": DEVICES, "max_query_len": 2048}
    problem = random_problem(lens, [n + context for n in lens], AttentionSpec(), **sizes)
    assert_tensor_parallel(problem, "cudnn")
    sizes |= {"num_heads": 4, "num_kv_heads": 1}
    problems = [
        random_problem(lens, [n + context for n in lens], AttentionSpec(), **sizes, seed=seed)
        for seed in range(DEVICES)
    ]
    assert_data_parallel(problems, "cudnn")
