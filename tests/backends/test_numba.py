"""What is the compiled kernel's own: threads, pieces, machine code kept on disk."""

import os
import platform
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, as_numpy, random_cache, rows, run
from forked import run_forked

from pagedattn import (
    AttentionSpec,
    KVCache,
    UnsupportedError,
    make_batch,
    paged_attention,
    write_kv,
)
from pagedattn._dispatch.registry import can_load
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn.testing.features import CACHE_DTYPES, DTYPES

if not can_load("numba") or jax.default_backend() != "cpu":
    pytest.skip("needs numba, and JAX on a CPU", allow_module_level=True)

from pagedattn._kernels.cpu import compiled, thread_pool
from pagedattn._kernels.cpu.simd import HAS_BF16_DOT, LANES
from pagedattn.backends import numba as backend

HERE = Path(__file__).parent
LARGE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "block_size": 16}


def attend(problem, threads):
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    chosen = backend.with_threads(threads)
    return paged_attention(query, cache, batch, problem.spec, backend=chosen, return_lse=True)


def check(problem, threads=1):
    assert_attention_close(*map(np.asarray, attend(problem, threads)), problem)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_every_number_of_eight_bits_is_read_as_it_is(cache_dtype, dtype):
    """All 256 as values of two keys, half of each of which make the result; NaN stays NaN."""
    held = np.arange(256, dtype=np.uint8).view(cache_dtype)
    cache = KVCache(jnp.zeros((1, 2, 1, 256), cache_dtype), jnp.asarray([[[held]] * 2]))
    batch, query = make_batch([1], [1], [[0]], block_size=2), jnp.ones((1, 1, 256), dtype)
    out = jax.jit(partial(paged_attention, backend="numba"))(query, cache, batch)
    np.testing.assert_array_equal(out[0, 0].astype(np.float32), held.astype(np.float32))


@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_keys_of_eight_bits_are_those_of_their_columns(cache_dtype):
    """The logit of a query that is 1 in one column, and 0 elsewhere, is what a key holds there."""
    held = np.linspace(-3, 3, 100).astype(cache_dtype)
    cache = KVCache(jnp.asarray(held).reshape(1, 1, 1, 100), jnp.zeros((1, 1, 1, 100), cache_dtype))
    batch = make_batch([1], [0], [[0]], block_size=1)
    call = partial(paged_attention, backend="numba", return_lse=True)
    call = jax.jit(partial(call, spec=AttentionSpec(scale=1.0)))
    _, lse = call(jnp.eye(100, dtype="bfloat16")[None], cache, batch)
    np.testing.assert_array_equal(lse[0], held.astype(np.float32))


@pytest.mark.parametrize("head_dim", [7, 48, 80, 192])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_eight_bits_with_a_tail(cache_dtype, head_dim):
    sizes = {"head_dim": head_dim, "dtype": jnp.dtype("bfloat16"), "cache_dtype": cache_dtype}
    check(random_problem([1, 2, 1], [33, 70, 1], SPECS["plain"], **sizes))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("options", SPECS)
def test_long_sequences_are_cut_into_pieces(options, threads):
    """Enough keys that several threads take part of one sequence; poison behind every end."""
    check(random_problem([1, 3, 1], [3001, 700, 16], SPECS[options], **LARGE), threads)


@pytest.mark.parametrize("head_dim", [1, 7, 16, 24, 80, 96, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_head_dims_with_a_tail(head_dim, dtype):
    sizes = {"head_dim": head_dim, "dtype": jnp.dtype(dtype)}
    check(random_problem([1, 2, 1], [33, 70, 1], SPECS["plain"], **sizes))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8])
def test_groups(group):
    check(random_problem([1, 2], [40, 65], SPECS["plain"], num_heads=2 * group, num_kv_heads=2))


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 128])
def test_block_sizes(block_size):
    check(random_problem([1, 5], [129, 60], SPECS["all"], block_size=block_size))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_do_not_depend_on_threads_beyond_rounding(dtype):
    problem = random_problem([1], [6000], SPECS["plain"], dtype=jnp.dtype(dtype), **LARGE)
    alone, together = (np.asarray(attend(problem, n)[0], np.float32) for n in (1, 4))
    np.testing.assert_allclose(alone, together, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("query_lens", [[48, 1], [49, 1, 2], [60, 0, 1, 30]])
def test_long_and_short_queries_in_one_call(query_lens):
    lens = [50 + 7 * n for n in query_lens]
    for options in ("plain", "all"):
        problem = random_problem(query_lens, lens, SPECS[options])
        assert_attention_close(*run(problem, "numba"), problem)
        assert_attention_close(*run(problem, "numba", "eager"), problem)


def test_float64_is_refused():
    with jax.enable_x64(True):
        problem = random_problem([1], [3], SPECS["plain"], dtype=np.float64)
        with pytest.raises(UnsupportedError, match="float64"):
            attend(problem, 1)


def test_programs_may_call_at_once():
    """Eight Python threads, each with a compiled program of its own, on XLA's one pool."""
    problems = [random_problem([1, 2], [2500, 90], SPECS[n], **LARGE) for n in ("plain", "all")]
    failures = []

    def repeat(problem):
        try:
            for _ in range(10):
                check(problem, 3)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=repeat, args=(problem,)) for problem in problems * 4]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not failures


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_set_in_the_memory_that_was_donated(dtype):
    cache = jax.tree.map(lambda plane: plane.astype(dtype), random_cache(num_blocks=64))
    before = as_numpy(jax.tree.map(jnp.copy, cache))  # what NumPy may look at is not overwritten
    new = jax.tree.map(lambda x: x.astype(dtype), rows(3, cache))
    place = [plane.unsafe_buffer_pointer() for plane in (cache.key, cache.value)]
    slots = jnp.array([5, -1, 200], jnp.int32)
    got = jax.jit(write_kv, donate_argnums=0)(cache, *new, slots)
    assert [plane.unsafe_buffer_pointer() for plane in (got.key, got.value)] == place
    for plane, old, row in zip(as_numpy(got), before, new, strict=True):
        flat = old.reshape(-1, *old.shape[2:])
        flat[5], flat[200] = np.asarray(row)[0], np.asarray(row)[2]
        np.testing.assert_array_equal(plane, old)


def test_an_array_that_is_not_donated_stays_as_it_was():
    cache = jax.tree.map(lambda plane: plane.astype("bfloat16"), random_cache())
    before = as_numpy(cache)
    jax.jit(write_kv)(cache, *rows(2, cache), jnp.array([0, 1]))
    for plane, old in zip(as_numpy(cache), before, strict=True):
        np.testing.assert_array_equal(plane, old)


def test_vmap():
    problem = random_problem([1, 1], [30, 9], SPECS["plain"])
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = partial(paged_attention, cache=cache, batch=batch, backend="numba")
    both = jax.jit(jax.vmap(lambda query: call(query)))(jnp.stack([query, -query]))
    for got, given in zip(both, (query, -query), strict=True):
        np.testing.assert_array_equal(got, call(given))


USE = """
import os, sys
import jax.numpy as jnp
from pagedattn import make_batch, paged_attention, init_kv_cache
batch = make_batch([1], [4], [[0, 1]], block_size=4)
query = jnp.ones((1, 2, 8), jnp.bfloat16)
out = paged_attention(query, init_kv_cache(2, 4, 1, 8), batch, backend="numba")
assert (out == 0).all()
"""
TWO_DEVICES = """
import jax
from jax.sharding import PartitionSpec as P
from pagedattn import KVCache
mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
heads = P(None, "heads", None)
planes = P(None, None, "heads", None)
def attend(query, cache, batch):
    return paged_attention(query, cache, batch, backend="numba")
rng = __import__("numpy").random.default_rng(0)
query = jnp.asarray(rng.standard_normal((1, 4, 8)), jnp.bfloat16)
cache = KVCache(*jnp.asarray(rng.standard_normal((2, 2, 4, 2, 8)), jnp.bfloat16))
spread = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=(heads, planes, P()), out_specs=heads))
assert (spread(query, cache, batch) == attend(query, cache, batch)).all()
"""
FORKED = """
import warnings; warnings.simplefilter("ignore")
import torch, pagedattn_torch
from pagedattn import KVCache
torch.set_num_threads(2)
cache = KVCache(torch.ones(2000, 16, 8, 64), torch.ones(2000, 16, 8, 64))
batch = make_batch([1], [31000], [list(range(2000))], block_size=16)
def attend():
    out = pagedattn_torch.paged_attention(torch.ones(1, 8, 64), cache, batch, backend="numba")
    assert torch.allclose(out, torch.ones_like(out))
attend()
child = os.fork()
attend()
if child == 0:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""

OUTLIVES = """
import threading, time
import torch, pagedattn_torch
from pagedattn import KVCache
torch.set_num_threads(2)
cache = KVCache(torch.ones(2000, 16, 8, 64), torch.ones(2000, 16, 8, 64))
batch = make_batch([1], [31000], [list(range(2000))], block_size=16)
def attend():
    threading.main_thread().join()
    time.sleep(0.2)  # the interpreter ends its pools of threads
    out = pagedattn_torch.paged_attention(torch.ones(1, 8, 64), cache, batch, backend="numba")
    print(torch.allclose(out, torch.ones_like(out)))
threading.Thread(target=attend).start()
"""

CALL = """
import pickle, jax.numpy as jnp
from jax.experimental import serialize_executable
from pagedattn import init_kv_cache, make_batch, paged_attention
def arrays(dtype):
    batch = make_batch([1], [5], [[1, 2]], block_size=4)
    return jnp.ones((1, 2, 8), dtype), init_kv_cache(3, 4, 1, 8, dtype), batch
attend = jax.jit(lambda *arrays: paged_attention(*arrays, backend="numba"))
"""
SAVED = """
compiled = attend.lower(*arrays("bfloat16")).compile()
pickle.dump(serialize_executable.serialize(compiled), open(FILE, "wb"))
"""
LOADED = """
attend(*arrays("float32"))
try:
    saved = serialize_executable.deserialize_and_load(*pickle.load(open(FILE, "rb")))
    saved(*arrays("bfloat16")).block_until_ready()
except Exception as error:
    assert "pagedattn_numba_attention_bfloat16" in str(error), error
else:
    raise SystemExit("it ran")
attend(*arrays("bfloat16"))
saved = serialize_executable.deserialize_and_load(*pickle.load(open(FILE, "rb")))
assert (saved(*arrays("bfloat16")) == 0).all()
"""

TOGETHER = """
import threading
barrier, failed = threading.Barrier(8), []
def first_call(query, cache, batch):
    barrier.wait()
    try:
        attend(query, cache, batch)
    except Exception as error:
        failed.append(error)
def given(dtype, num_blocks):
    query, _, batch = arrays(dtype)
    return query, init_kv_cache(num_blocks, 4, 1, 8, dtype), batch
threads = [
    threading.Thread(target=first_call, args=given(dtype, num_blocks))
    for dtype in ("float32", "bfloat16") for num_blocks in range(3, 7)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
"""


HALVES = """
from pagedattn import KVCache
import jax, numpy as np
held = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(256, 256)
for other in (held, np.roll(held, 1), np.roll(held, 1 << 10)):  # as they are, ties, sums rounded
    value = jnp.asarray(np.stack([held, other])[None])
    cache, query = KVCache(jnp.zeros_like(value), value), jnp.ones((1, 256, 256), "float16")
    out = paged_attention(query, cache, make_batch([1], [1], [[0]], block_size=2), backend="numba")
    with np.errstate(all="ignore"):
        mean = (held.astype(np.float32) + other.astype(np.float32)) / 2
        np.testing.assert_array_equal(np.asarray(out)[0], mean.astype(np.float16))
"""
DECODES = """
import numpy as np
from pagedattn.testing import assert_attention_close, attend, random_problem
from pagedattn import AttentionSpec
kinds = [{"dtype": jnp.dtype("bfloat16")}]
of_tokens = {"dtype": jnp.dtype("bfloat16"), "head_dim": 64, "token_scales": True}
kinds += [of_tokens | {"cache_dtype": held} for held in ("int8", "int4")]
fours = of_tokens | {"cache_dtype": "int4"}
latents = {"head_dim": 128, "value_dim": 100, "latent": True, "num_kv_heads": 1}
kinds += [fours | more for more in ({"head_dim": 192}, {"arrays": ["bias"]}, latents)]
for kind in kinds:
    problem = random_problem([1, 2], [70, 33], AttentionSpec(), **kind)
    out = attend(problem, backend="numba")
    assert_attention_close(*map(np.asarray, out), problem)
"""
# Compiling takes the time: so decodes of bfloat16 and of quantised caches, prompts of bfloat16.
KINDS = "from cpu_prompts import check_all\ncheck_all(threads=2)\n" + DECODES
# Which are faster is a matter of the CPU, so these are those that it would not take.
OTHERS = """
from pagedattn._kernels.cpu import rates
faster = not rates.pairs_are_faster()
rates.pairs_are_faster = lambda: faster
"""


def in_a_process(code):
    code = "import jax; jax.config.update('jax_platforms', 'cpu')\n" + code
    done = run_forked(code, "jax.numpy", "numba", *["torch"] * can_load("sdpa"))
    assert done.returncode == 0, done.stderr
    return done


def test_several_devices():
    in_a_process("jax.config.update('jax_num_cpu_devices', 2)\n" + USE + TWO_DEVICES)


def test_first_calls_in_several_threads():
    in_a_process(CALL + TOGETHER)


def test_a_process_that_was_forked():
    pytest.importorskip("torch")
    in_a_process(USE + FORKED)


def test_a_thread_that_outlives_the_main_one():
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", USE + OUTLIVES], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True"], done.stderr


@pytest.mark.parametrize("prepared", [1, 2, 5])
@pytest.mark.parametrize("now", [1, 2, 5])
def test_torch_threads_may_change_after_a_step_was_prepared(prepared, now):
    torch, layers = pytest.importorskip("torch"), pytest.importorskip("pagedattn_torch")
    problem = random_problem([1, 3, 1], [3001, 700, 16], SPECS["plain"], **LARGE)
    query, cache = torch.from_numpy(problem.query), cache_of(problem)
    cache = KVCache(*map(torch.from_dlpack, cache.planes))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(prepared)
        step = layers.prepare(query, cache, batch_of(problem), problem.spec, backend="numba")
        torch.set_num_threads(now)
        out, _ = step.attend(query, cache)
    finally:
        torch.set_num_threads(before)
    assert_attention_close(out, None, problem)


def test_a_loaded_program_runs_once_its_dtypes_have_been_compiled(tmp_path):
    """Before, it is an error that names what is missing."""
    file = f"FILE = {str(tmp_path / 'saved')!r}\n"
    in_a_process(file + CALL + SAVED)
    in_a_process(file + CALL + LOADED)


def test_machine_code_is_kept_on_disk():
    """Another process finds what this one compiled, if no earlier one did, and compiles nothing."""
    compiled.task("bfloat16", "bfloat16"), thread_pool.attention(), thread_pool.worker()
    count = "\nfrom pagedattn._kernels.cpu.compiled import task\n"
    count += "from pagedattn._kernels.cpu.thread_pool import attention, worker\n"
    count += "kept = task('bfloat16', 'bfloat16'), attention(), worker()\n"
    count += "print([function.cache_hits for function in kept])"
    assert in_a_process(USE + count).stdout.split() == ["[1,", "1,", "1]"]


@pytest.mark.parametrize(
    ("setting", "code"),
    [
        ({"NUMBA_CPU_NAME": "generic"}, HALVES + KINDS),
        ({"NUMBA_ENABLE_AVX": "0"}, HALVES),
        ({"NUMBA_CPU_FEATURES": "+sse2,+avx,+avx2,+fma,+f16c"}, HALVES + KINDS),
    ],
    ids=["NUMBA_CPU_NAME", "NUMBA_ENABLE_AVX", "NUMBA_CPU_FEATURES"],
)
def test_vectors_are_those_that_numba_compiles_for(setting, code, tmp_path):
    """Its settings take from what the CPU has; LLVM ends a process that uses the rest."""
    if platform.machine() != "x86_64":
        pytest.skip("features of x86-64")
    if LANES == 8 and "+avx2" in setting.get("NUMBA_CPU_FEATURES", ""):
        pytest.skip("this CPU has no others that are used: all tests here are of them")
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | setting | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    environment |= {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", USE + code],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not HAS_BF16_DOT, reason="needs products of pairs of bfloat16")
def test_products_that_this_cpu_would_not_take_are_right():
    in_a_process(OTHERS + USE + DECODES)


ELSEWHERE = """
import ctypes, os
del os.register_at_fork
load = ctypes.CDLL
class Library:
    pass
ctypes.CDLL = lambda name, *rest, **more: Library() if name is None else load(name, *rest, **more)
import torch, pagedattn_torch
from pagedattn import BackendUnavailableError, KVCache, available_backends, make_batch
cache = KVCache(torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8))
arrays = torch.ones(1, 2, 8), cache, make_batch([1], [4], [[0, 1]], block_size=4)
assert (pagedattn_torch.paged_attention(*arrays) == 0).all()
try:
    pagedattn_torch.paged_attention(*arrays, backend="numba")
except BackendUnavailableError as error:
    assert "lacks" in str(error) and "Linux and macOS" in str(error), error
else:
    raise SystemExit("it ran")
assert "numba" not in available_backends()
"""


def test_it_is_refused_where_the_system_lacks_its_functions():
    """As on Windows, where a process cannot be forked either."""
    pytest.importorskip("torch")
    in_a_process(ELSEWHERE)


def test_processes_may_compile_at_once_and_without_a_folder_to_write_to(tmp_path):
    """The smallest function, which is kept as the others are."""
    folders = [str(tmp_path), str(tmp_path), "/proc/nowhere"]
    environments = [os.environ | {"NUMBA_CACHE_DIR": folder} for folder in folders]
    code = "from pagedattn._kernels.cpu.thread_pool import worker\nassert worker().address"
    command = [sys.executable, "-c", code]
    running = [subprocess.Popen(command, env=e, stderr=subprocess.PIPE) for e in environments]
    errors = [process.communicate()[1] for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], errors
    assert list(tmp_path.glob("**/*worker*.nbi"))
