"""The Triton kernels on CPU tensors, by Triton's interpreter, held to the oracle.

Triton decides at its import whether it interprets, so `test_triton_interpreted` runs this file in a
process of its own: `TRITON_INTERPRET=1 python -m pytest tests/interpreters/triton_interpreted.py`.
"""

import dataclasses
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
import triton.language as tl
from cases import SIGNED, SPECS, grown, mixed
from hypothesis import given
from hypothesis import strategies as st
from int4_decodes import INT4_DECODES, int4_decodes
from rearranged import calls, differing, prompts
from triton import knobs
from triton.runtime import interpreter

from pagedattn import AttentionSpec, KVCache, UnsupportedError
from pagedattn._dispatch import dequantise, emulate
from pagedattn._dispatch.call import call_of
from pagedattn._dispatch.options import for_backends
from pagedattn._kernels.triton import programs
from pagedattn._kernels.triton.selection import choice_kernel, scores_kernel
from pagedattn._kernels.triton.tiling import Tiling, tiling
from pagedattn._kernels.triton.widths import power_of_two
from pagedattn.backends.triton.scores import constants_of
from pagedattn.batch.packed import packed_batch
from pagedattn.selection import choice
from pagedattn.selection import scores as block_scores
from pagedattn.testing import (
    Problem,
    assert_attention_close,
    batch_of,
    cache_of,
    random_problem,
    reference_attention,
)
from pagedattn.testing.features import CACHE_DTYPES, OPTIONS
from pagedattn.testing.strategies import any_phase, seeds
from pagedattn_torch import paged_attention
from pagedattn_torch.arrays import batch_on
from pagedattn_torch.backends import triton as backend

assert knobs.runtime.interpret, "set TRITON_INTERPRET=1"

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)
PLAIN = AttentionSpec()
SCALES = "key_scale", "value_scale"
CAUSAL = [name for name, spec in SPECS.items() if spec.causal]
# By another name: the backend of the name "triton" is held to CUDA.
INTERPRETED = dataclasses.replace(backend.BACKEND, name="interpreted")
BY_TRITON = {"backend": INTERPRETED, "return_lse": True}


# Shortcomings of Triton 3.6's interpreter: it asks arrays of one element for an int, which NumPy
# 2.4 refuses, multiplies bfloat16 by its bits, takes the bits of integers for it, rounds to it
# towards 0, and patches its language anew for each call of a function by another.


def patch_lang_tensor(tensor, scope, original=interpreter._patch_lang_tensor):
    original(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def create_dot(self, a, b, d, *precision):
    return interpreter.TensorHandle(product(a, b) + d.data, d.dtype.scalar)


def cast_impl(self, source, target, original=interpreter.InterpreterBuilder.cast_impl):
    if target.scalar == tl.bfloat16 and source.dtype.scalar.is_int():
        source = interpreter.TensorHandle(source.data.astype(np.float32), tl.float32)
    if target.scalar == tl.bfloat16 and source.dtype.scalar == tl.float32:
        rounded = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)
    return original(self, source, target)


def product(a, b):
    """In float64, so that rounding to float32 hides in which order BLAS adds up."""
    return (float32(a).astype(np.float64) @ float32(b)).astype(np.float32)


def float32(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data.astype(np.float32)


def call(self, *args, **kwargs):
    """A kernel's call of a function, whose names its launch has patched, or the last line below."""
    return self.rewrite()(*args, **kwargs)


interpreter.InterpretedFunction.__call__ = call
interpreter._patch_lang_tensor = patch_lang_tensor
interpreter.InterpreterBuilder.create_dot = create_dot
interpreter.InterpreterBuilder.cast_impl = cast_impl
interpreter._patch_lang(tl.cdiv.fn)  # what the language's own functions use


def tensor(array: np.ndarray) -> torch.Tensor:
    if not hasattr(np, array.dtype.name):  # those of ml_dtypes
        bits = torch.from_numpy(array.view(f"i{array.dtype.itemsize}").copy())
        return bits.view(getattr(torch, array.dtype.name))
    return torch.from_numpy(np.ascontiguousarray(array))


def arrays_of(problem: Problem, **changes):
    """A problem as tensors; `changes` replace fields of the batch."""
    scales = (problem.key_scale, problem.value_scale)
    scales = (scale if scale is None else torch.as_tensor(scale) for scale in scales)
    planes = problem.key_cache, problem.value_cache
    planes = (plane if plane is None else tensor(plane) for plane in planes)
    cache = KVCache(*planes, *scales, value_dim=problem.value_dim)
    batch = dataclasses.replace(batch_on(batch_of(problem), "cpu"), **changes)
    return tensor(problem.query), cache, batch


def apart(array):
    """The same numbers, with others between them in memory."""
    return torch.stack([array, torch.full_like(array, 77)], -1)[..., 0]


def run(query, cache, batch, spec, batch_invariant=False, **arrays):
    """The backend, without the checks that come before it."""
    flags = {"return_lse": True, "batch_invariant": batch_invariant}
    call = call_of(query, cache, batch, spec, **flags, **arrays)
    arrays = for_backends(arrays, batch, call.block_size)
    given = (backend.plan(call, batch), emulate.live_tokens(call, batch), arrays)
    return emulate.attend(backend.BACKEND, call, query, cache, *given)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """New memory holds NaN: what the kernels leave out shows."""

    def poisoned(allocate):
        def allocate_nan(*args, **options):
            memory = allocate(*args, **options)
            return memory.fill_(torch.nan) if memory.is_floating_point() else memory

        return allocate_nan

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


def solve(problem: Problem, batch_invariant=False, **changes):
    options = jax.tree.map(tensor, problem.arrays)
    return run(*arrays_of(problem, **changes), problem.spec, batch_invariant, **options)


def check(problem: Problem, **changes):
    assert_attention_close(*solve(problem, **changes), problem, name="triton")


def tiled(problem: Problem) -> Tiling:
    arrays = arrays_of(problem)
    return tiling(call_of(*arrays, problem.spec), backend._device(arrays[0].device))


def splits(problem: Problem) -> int:
    return tiled(problem).splits


@pytest.mark.parametrize("max_query_len", [8, 32])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, np.float32) for name in SPECS), *itertools.product(["plain", "all"], DTYPES[1:])],
)
def test_every_feature(name, max_query_len, dtype):
    """Prefill, chunk, decode, empty and padding, by given tiles and by searched ones."""
    check(mixed(SPECS[name], dtype=dtype, max_query_len=max_query_len))


@pytest.mark.parametrize("max_query_len", [8, 32])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_sinks(name, max_query_len):
    """Rows without keys and padding too, by one split and by many: the first has the sinks."""
    check(mixed(SPECS[name], max_query_len=max_query_len, arrays=["sinks"]))
    check(random_problem([3, 1], [0, 5], SPECS[name], pad_tokens=6, arrays=["sinks"]))
    problem = random_problem([1, 2, 1], [300, 64, 0], SPECS[name], arrays=["sinks"])
    assert name == "all" or splits(problem) > 4
    check(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_caches_of_eight_bits(cache_dtype, dtype):
    check(mixed(SPECS["all"], cache_dtype=cache_dtype, dtype=dtype))
    check(mixed(cache_dtype=cache_dtype, dtype=dtype, max_query_len=32))


@pytest.mark.parametrize(
    ("cache_dtype", "dtype", "batch_invariant"),
    [
        (held, dtype, (i + j) % 2 == 0)
        for i, held in enumerate(CACHE_DTYPES)
        for j, dtype in enumerate(DTYPES)
    ],
)
def test_scales_of_heads(cache_dtype, dtype, batch_invariant):
    """One number or one for each KV head, of any magnitude; keys are split, segments joined."""
    problem = random_problem(
        [1, 3], [600, 40], PLAIN, cache_dtype=cache_dtype, dtype=dtype, max_query_len=4
    )
    one, each = np.float32(0.03), np.float32([3.0, 2.0**-9])
    far = {"key_scale": np.float32([2.0**-40, 2.0**20]), "spec": AttentionSpec(scale=2.0**-24)}
    unscaled = {"key_scale": None, "query": problem.query / dtype(100)}
    for changes in (
        {"key_scale": one, "value_scale": each},
        {"value_scale": one, **far},
        unscaled,
        {"value_scale": None},
    ):
        check(problem.replace(**changes), batch_invariant=batch_invariant)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_layers_with_scales_of_any_kind_share_a_plan(batch_invariant):
    """A step is prepared before its layers' scales are known."""
    problem = random_problem([1, 3], [600, 40], PLAIN, cache_dtype="int8", max_query_len=4)
    arrays, flags = arrays_of(problem), {"batch_invariant": batch_invariant, "return_lse": True}
    plan = backend.plan(call_of(*arrays, PLAIN, **flags), arrays[2])
    one, each = np.float32(0.02), np.float32([0.1, 0.003])
    pairs = (None, None), (one, each), (each, None), (None, one), (each, each), (one, one)
    for key_scale, value_scale in pairs:
        query = problem.query / np.float32(1 if key_scale is not None else 100)
        layer = problem.replace(key_scale=key_scale, value_scale=value_scale, query=query)
        query, cache, batch = arrays_of(layer)
        got = backend.run(call_of(query, cache, batch, PLAIN, **flags), query, cache, plan)
        assert_attention_close(*(x.numpy() for x in got), layer, name="triton")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("max_query_len", [8, 32])
@pytest.mark.parametrize("spec", [PLAIN, SPECS["all"], AttentionSpec(causal=False)])
def test_chosen_blocks(spec, max_query_len, batch_invariant, dtype):
    """Of any numbers, for given tiles and for searched ones; what is left out holds NaN."""
    problem = mixed(spec, dtype=dtype, max_query_len=max_query_len, arrays=["selection", "sinks"])
    got = solve(problem, batch_invariant=batch_invariant)
    assert_attention_close(*got, problem, name="triton")


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "block_size", "window"),
    [([1, 2], 16, None), ([1, 1], 128, None), ([1, 1], 128, 100), ([40, 1], 16, 100)],
)
def test_chosen_blocks_of_long_sequences(query_lens, block_size, window, batch_invariant):
    """All of them give the bits of dense attention; a few of them are split too."""
    spec, lens = AttentionSpec(sliding_window=window), [650, 550]
    problem = random_problem(query_lens, lens, spec, block_size=block_size, poison=None)
    columns = max(map(len, problem.block_tables))
    every = np.tile(np.arange(columns, dtype=np.int32), (2, 2, 1))
    want = solve(problem, batch_invariant=batch_invariant)
    got = solve(problem.replace(selection=every), batch_invariant=batch_invariant)
    for pair in zip(got, want, strict=True):
        np.testing.assert_array_equal(*pair)
    rng = np.random.default_rng(0)
    few = rng.permuted(every, axis=2)[..., : max(2, columns // 2)]
    problem = problem.replace(selection=few).poisoned()
    got = solve(problem, batch_invariant=batch_invariant)
    assert_attention_close(*got, problem, name="triton")


@hypothesis.settings(max_examples=25)
@given(
    width=st.sampled_from([1, 7, 64, 100]),
    count=st.integers(1, 100),
    levels=st.sampled_from([2, 5, 10**6]),
    seed=st.integers(0, 999),
)
def test_the_choice_of_the_best_blocks(width, count, levels, seed):
    """As XLA's sorts choose: of equal scores the first, -inf and NaN never."""
    rng = np.random.default_rng(seed)
    scores = rng.integers(-levels, levels, (3, width)).astype(np.float32) / 3
    scores[rng.random(scores.shape) < 0.1] = -np.inf
    scores[rng.random(scores.shape) < 0.1] = np.nan
    scores[0, : width // 2] = -np.inf
    count = min(count, width)
    chosen = torch.full((3, count), 7, dtype=torch.int32)
    sizes = {"COLUMNS": width, "CHOSEN": count}
    sizes |= {"WIDTH": power_of_two(width), "PLACES": power_of_two(count)}
    choice_kernel[(3,)](torch.from_numpy(scores), chosen, **sizes)
    plain = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    np.testing.assert_array_equal(chosen, choice.by_xla(plain[None], count)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few", [False, True], ids=["alike", "eight bits"])
@pytest.mark.parametrize("num_planes", [1, 2])
@pytest.mark.parametrize(("rows", "head_dim", "columns"), [(1, 16, 5), (4, 24, 70), (80, 64, 65)])
def test_scores_of_blocks(rows, head_dim, columns, num_planes, few, dtype):
    """As XLA computes them; of sequences with fewer rows, without any, and without blocks."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((num_planes, 3, rows, 2, head_dim)).astype(dtype)
    planes = rng.standard_normal((num_planes, 40, 2, head_dim))
    planes = planes.astype("float8_e4m3fn" if few else dtype)
    blocks = rng.integers(-1, 40, (3, columns)).astype(np.int32)
    num_rows = np.array([rows, max(1, rows // 2), 0], np.int32)
    arrays = jax.tree.map(jnp.asarray, (tuple(queries), num_rows, tuple(planes), blocks))
    want = block_scores.by_xla(*arrays)
    got = torch.full((3, 2, columns), torch.nan)
    constants = constants_of(3, rows, 2, head_dim, columns, num_planes, np.dtype(dtype).itemsize)
    given = map(tensor, (queries, num_rows, planes[0], planes[-1], blocks))
    scores_kernel[(6, -(-columns // constants["TILE"]))](*given, got, **constants)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


TOKENS = {"token_scales": True}


@pytest.mark.parametrize(
    ("dtype", "batch_invariant"), [*((dtype, False) for dtype in DTYPES), (DTYPES[2], True)]
)
@pytest.mark.parametrize("cache_dtype", [*CACHE_DTYPES, "int4"])
def test_scales_of_tokens(cache_dtype, dtype, batch_invariant):
    """Those that no query sees hold NaN. With sinks, and keys that are split."""
    cache = {"cache_dtype": cache_dtype, "dtype": dtype, **TOKENS}
    options = {"batch_invariant": batch_invariant}
    check(mixed(SPECS["all"], **cache), **options)
    check(mixed(max_query_len=32, arrays=["sinks"], **cache), **options)
    problem = random_problem([1, 2, 1], [300, 64, 0], PLAIN, arrays=["sinks"], **cache)
    assert splits(problem) > 1
    check(problem, **options)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("value_dim", [None, 20])
@pytest.mark.parametrize("head_dim", [12, 64, 80, 96, 128, 256])
def test_groups_of_columns(head_dim, value_dim, batch_invariant):
    """Halves that hold groups, or cut one; tiles that are wider than the halves."""
    cache = {"cache_dtype": "int4", "head_dim": head_dim, "value_dim": value_dim, **TOKENS}
    for query_lens in ([3, 1], [17, 1]):
        problem = random_problem(query_lens, [39, 90], PLAIN, dtype=np.float16, **cache)
        check(problem, batch_invariant=batch_invariant)


@pytest.mark.parametrize("size", [2.0**-90, 2.0**-10, 1.0, 2.0**60])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_scales_of_any_size(dtype, size):
    """Also beside a sink, which is not scaled: weights times scales are rounded to float16."""
    lens = [1, 20], [70, 33]
    problem = random_problem(
        *lens, PLAIN, cache_dtype="int8", dtype=dtype, arrays=["sinks"], **TOKENS
    )
    rng = np.random.default_rng(0)
    scale = np.exp2(rng.uniform(-8, 8, problem.value_scale.shape)) * size
    check(problem.replace(value_scale=scale.astype(np.float32)))


@pytest.mark.parametrize("size", [2.0**-14, 2.0**14])
def test_scales_of_groups_of_any_size(size):
    problem = random_problem(
        [1, 20], [70, 33], PLAIN, cache_dtype="int4", dtype=ml_dtypes.bfloat16, **TOKENS
    )
    rng = np.random.default_rng(0)
    scale = np.exp2(rng.uniform(0, 1.9, problem.value_scale.shape)) * size
    check(problem.replace(value_scale=scale.astype(np.float16)))


@pytest.fixture
def dequantised_first(monkeypatch):
    """As the keys and values of long prompts are, with per-token scales."""
    rules = dequantise.Rules(*[dequantise.Rule(tokens=0, keys=1 << 20)] * 3, most_bytes=1 << 30)
    monkeypatch.setattr(backend, "TRITON", rules)


@pytest.mark.usefixtures("dequantised_first")
@pytest.mark.parametrize("cache_dtype", [*CACHE_DTYPES, "int4"])
def test_caches_that_are_dequantised_first(cache_dtype):
    """Not where bits may not depend on it."""
    kinds = {"cache_dtype": cache_dtype, "dtype": ml_dtypes.bfloat16, **TOKENS}
    problem = mixed(AttentionSpec(logits_soft_cap=2.0), **kinds)
    query, cache, batch = arrays_of(problem)
    for invariant in (False, True):
        call = call_of(query, cache, batch, problem.spec, batch_invariant=invariant)
        assert (backend.plan(call, batch).dequantised is None) == invariant
        check(problem, batch_invariant=invariant)
    call = dataclasses.replace(call, batch_invariant=False)
    held = backend.dequantised(call, query, cache, batch.block_tables, batch.seq_lens)
    assert dequantise.dequantised_call(call) == call_of(query, held, batch, problem.spec)


@pytest.mark.usefixtures("dequantised_first")
@pytest.mark.parametrize("cache_dtype", [*CACHE_DTYPES, "int4"])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *(((64, 48, 16), dtype) for dtype in DTYPES),
        ((20, 40, 4), ml_dtypes.bfloat16),
        ((128, 128, 128), ml_dtypes.bfloat16),
    ],
)
def test_what_is_dequantised(cache_dtype, dtype, sizes):
    """The bits that XLA makes of each block in use, and nothing elsewhere."""
    head_dim, value_dim, block_size = sizes
    columns = {"head_dim": head_dim, "value_dim": value_dim, "block_size": block_size}
    problem = mixed(cache_dtype=cache_dtype, dtype=dtype, **columns, **TOKENS)
    query, cache, batch = arrays_of(problem)
    cache = dataclasses.replace(cache, **{name: apart(getattr(cache, name)) for name in SCALES})
    call = call_of(query, cache, batch, problem.spec)
    got = backend.dequantised(call, query, cache, batch.block_tables, batch.seq_lens)
    tables, every = batch_of(problem).block_tables, cache_of(problem)
    want = dequantise.dequantised_cache(call, every, tables, jnp.dtype(dtype))
    ends = -(-np.asarray(problem.seq_lens) // block_size)
    used = (np.arange(tables.shape[1])[None] < ends[:, None]).reshape(-1)
    for plane, other in zip(got.planes, want.planes, strict=True):
        numbers = plane.float().numpy()
        np.testing.assert_array_equal(numbers[used], np.asarray(other, np.float32)[used])
        assert np.isnan(numbers[~used]).all()


@pytest.fixture
def few_keys(monkeypatch):
    """By int4_decode.py, although there are few keys for each warp."""
    monkeypatch.setattr(programs, "INT4_DECODE_KEYS", 0)


@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("name", INT4_DECODES)
def test_int4_decodes(name):
    problem = int4_decodes(name)
    assert tiled(problem).kv_heads in (1, 2)
    check(problem)


@pytest.mark.usefixtures("few_keys")
def test_int4_decodes_share_programs_by_pairs_of_heads():
    kv_heads = {name: tiled(int4_decodes(name)).kv_heads for name in INT4_DECODES}
    alone = {"odd KV heads", "group of 8", "group of 5"}
    assert {name for name in INT4_DECODES if kv_heads[name] == 1} == alone


@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("name", ["group of 4", "group of 8", "sinks, cap and window"])
def test_int4_decodes_whose_keys_are_not_split(monkeypatch, name):
    monkeypatch.setattr(programs, "INT4_DECODE_WARPS", 0)
    problem = int4_decodes(name)
    assert tiled(problem).splits == 1
    check(problem)


@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("size", [2.0**-14, 1.0, 2.0**12])
def test_int4_decodes_of_scales_far_apart(size):
    """Of keys, groups and heads, also beside a sink."""
    problem = int4_decodes("sinks")
    rng = np.random.default_rng(0)
    scale = np.exp2(rng.uniform(0, 4, problem.value_scale.shape)) * size
    check(problem.replace(value_scale=scale.astype(np.float16)))


@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize("size", [2.0**-60, 2.0**60])
def test_int4_decodes_of_queries_of_any_size(size):
    problem = int4_decodes("group of 4", spec=AttentionSpec(scale=0.1 / size))
    query = problem.query.astype(np.float32) * size
    check(problem.replace(query=query.astype(problem.query.dtype)))


@pytest.mark.usefixtures("few_keys")
@pytest.mark.parametrize(
    "changes",
    [{"max_query_len": 2}, {"num_heads": 18}, {"head_dim": 64}, {"dtype": np.float16}],
    ids=str,
)
def test_other_calls_over_int4_are_not_int4_decodes(changes):
    kwargs = {"head_dim": 128, "max_query_len": 1, "dtype": ml_dtypes.bfloat16} | changes
    problem = random_problem([1, 1], [70, 33], PLAIN, cache_dtype="int4", **kwargs, **TOKENS)
    assert tiled(problem).kv_heads == 0


def read_by_it(problem: Problem) -> bool:
    """Whether it is not refused: it has no bias, nor four bits of which it reads no columns."""
    query, cache, batch = arrays_of(problem)
    call = call_of(query, cache, batch, problem.spec, **problem.arrays)
    return not backend.BACKEND.why_not(call)


@hypothesis.settings(max_examples=25)
@given(problem=any_phase())
def test_any_problem(problem):
    hypothesis.assume(read_by_it(problem))
    check(problem)


@pytest.mark.parametrize("max_query_len", [8, 32, 300])
@pytest.mark.parametrize("name", CAUSAL)
def test_drafts_that_branch(name, max_query_len):
    """In mixed batches, by given tiles and searched ones, of one word of ancestors and of ten."""
    problem = mixed(SPECS[name], max_query_len=max_query_len, arrays=["sinks"])
    check(grown(problem, max_query_len).poisoned())


@pytest.mark.parametrize("name", ["plain", "all"])
def test_trees_of_many_words(name):
    """Of several tiles, some without masks; split keys; tokens without a context; eight bits."""
    for lens, sizes in (
        (([140, 70, 1], [300, 70, 90]), {"num_heads": 2, "num_kv_heads": 1}),
        (([40, 3], [30, 400]), {"cache_dtype": "int8"}),
        (([8, 5], [700, 5]), {"block_size": 64}),
    ):
        check(grown(random_problem(*lens, SPECS[name], **sizes), 7, 0.3).poisoned())


@hypothesis.settings(max_examples=15)
@given(problem=any_phase(poison=False), seed=seeds(), branching=st.sampled_from([0.0, 0.3, 1.0]))
def test_any_tree(problem, seed, branching):
    hypothesis.assume(problem.spec.causal)
    problem = grown(problem, seed, branching)
    hypothesis.assume(read_by_it(problem))
    check(problem.poisoned())


# What the kernels have in every bit; blocks of other sizes are other selections.
OTHERS = {"bias", "selection", "parents"}
KNOWN = [name for name, options in OPTIONS.items() if not OTHERS & {*options}]


def invariant(problem: Problem, _jit: bool = False):
    """out and lse, in NumPy; float32 holds every number of 16 bits."""
    return [x.float().numpy() for x in solve(problem, batch_invariant=True)]


@hypothesis.settings(max_examples=8)
@given(data=st.data())
def test_other_batches_give_the_same_bits(data):
    """By given tiles and searched ones, whose keys are split or not."""
    problem = data.draw(prompts(KNOWN))
    hypothesis.assume(read_by_it(problem))
    wrong = differing(problem, data.draw(calls(problem)), invariant)
    assert not wrong, "\n".join(wrong)


@hypothesis.settings(max_examples=25)
@given(problem=any_phase())
def test_any_problem_with_the_same_bits_in_every_batch(problem):
    hypothesis.assume(read_by_it(problem) and problem.parents is None)
    check(problem, batch_invariant=True)


LATENT = {"value_dim": 8, "latent": True}


@pytest.mark.parametrize(
    ("cache_dtype", "max_query_len"), [(None, 8), (None, 32), *((held, 8) for held in CACHE_DTYPES)]
)
@pytest.mark.parametrize(("name", "cache"), [("plain", LATENT), ("all", {})], ids=str)
def test_segments(name, cache, cache_dtype, max_query_len):
    """Of padding, of rows without keys, and of sequences of several, joined in both ways."""
    sizes = {"max_query_len": max_query_len, "pad_tokens": 13, "cache_dtype": cache_dtype, **cache}
    for last, arrays in ((0, []), (5, ["sinks"])):
        lens = [3, 2, 0, 1, 1, 1], [1100, 513, 7, 512, 1020, last]
        check(random_problem(*lens, SPECS[name], arrays=arrays, **sizes), batch_invariant=True)


WINDOWED = AttentionSpec(causal=False, sliding_window=6, logits_soft_cap=3.0)


@pytest.mark.parametrize("head_dim", [16, 24, 80, 256])
@pytest.mark.parametrize("max_query_len", [4, 32])
def test_head_dims(head_dim, max_query_len):
    sizes = {"head_dim": head_dim, "dtype": np.float16, "max_query_len": max_query_len}
    check(random_problem([3, 1], [9, 21], WINDOWED, **sizes))


WIDTHS = [
    (16, {"value_dim": 24}),  # wider than the keys
    (24, {"value_dim": 1}),
    (192, {"value_dim": 128}),
    (320, {}),  # two tiles of keys, one of values
    (512, {}),
    (16, {"value_dim": 16, "latent": True}),  # the keys are the values
    (24, {"value_dim": 5, "latent": True}),  # a part of the first tile, and keys that pad theirs
    (40, {"value_dim": 33, "latent": True}),  # one tile, for the values' sake
    (576, {"value_dim": 512, "latent": True}),
    (288, {"value_dim": 256, "latent": True, "cache_dtype": "float8_e4m3fn"}),
]


@pytest.mark.parametrize("query_lens", [[3, 1], [17, 1]])
@pytest.mark.parametrize(("head_dim", "cache"), WIDTHS, ids=str)
def test_widths(head_dim, cache, query_lens):
    sizes = {"head_dim": head_dim, "dtype": ml_dtypes.bfloat16, "num_blocks": 40}
    check(random_problem(query_lens, [39, 21], WINDOWED, **sizes, **cache))


@pytest.mark.parametrize(("num_heads", "longest"), [(5, 270), (130, 40)])
def test_latent_decode(num_heads, longest):
    """Split keys, and tiles of some heads."""
    heads = {"num_heads": num_heads, "num_kv_heads": 1, "arrays": ["sinks"]}
    latent = {"value_dim": 16, "latent": True, "head_dim": 24}
    problem = random_problem(
        [1, 2, 0], [longest, 33, 7], AttentionSpec(scale=0.2), **heads, **latent
    )
    assert (splits(problem) > 1) == (longest > 128)
    check(problem)


def test_values_of_other_strides():
    """As wide as the keys, in a plane with room behind each row."""
    problem = mixed(SPECS["all"])
    query, cache, batch = arrays_of(problem)
    roomy = torch.full((*cache.value.shape[:3], 24), torch.nan)
    roomy[..., :16] = cache.value
    out, lse = run(query, KVCache(cache.key, roomy[..., :16]), batch, problem.spec)
    assert_attention_close(out, lse, problem, name="triton")


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(3, 3), (6, 2), (5, 1), (71, 1), (130, 1)])
@pytest.mark.parametrize("query_lens", [[2, 1], [17, 1]])
def test_groups(num_heads, num_kv_heads, query_lens):
    spec = AttentionSpec(alibi_slopes=tuple(np.linspace(-0.5, 0.5, num_heads)))
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
    check(random_problem(query_lens, [19, 23], spec, **heads))


@pytest.mark.parametrize("block_size", [1, 3, 16, 48, 64, 128])
@pytest.mark.parametrize("query_lens", [[1, 2, 1], [20, 2, 1]])
def test_block_sizes(block_size, query_lens):
    spec = AttentionSpec(sliding_window=70)
    check(random_problem(query_lens, [150, 33, 1], spec, block_size=block_size))


@pytest.mark.parametrize("block_size", [4, 64])
def test_entries_behind_a_window_are_not_followed(block_size):
    """-1 there, which is clamped to the first block; that one and the last hold NaN."""
    spec, lens = AttentionSpec(sliding_window=9), [300, 270]
    width = -(-300 // block_size)
    tables = torch.arange(1, 2 * width + 1, dtype=torch.int32).view(2, width)
    sizes = {"block_size": block_size, "num_blocks": 2 * width + 2, "max_query_len": 2}
    problem = random_problem([1, 2], lens, spec, block_tables=tables.numpy(), **sizes)
    assert np.isnan(problem.key_cache[[0, -1]]).all()
    columns, first = torch.arange(width), (torch.tensor([299, 268]) - 8) // block_size
    check(problem, block_tables=tables.masked_fill(columns < first[:, None], -1))


@pytest.mark.parametrize("name", SPECS)
def test_split_decode(name):
    """Sequences of every length between no key and many splits' worth."""
    lens = [300, 64, 65, 1, 0, 129]
    problem = random_problem([1, 2, 1, 1, 0, 1], lens, SPECS[name], max_query_len=2)
    assert name in ("sliding_window", "all") or splits(problem) > 4
    check(problem)


@pytest.mark.parametrize("causal", [True, False])
def test_split_chunk(causal):
    spec = AttentionSpec(causal=causal)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "block_size": 64, "pad_tokens": 25}
    problem = random_problem([20, 1], [1100, 3], spec, **sizes)
    assert splits(problem) > 1
    check(problem)


def test_far_splits_merge_exactly():
    """Keys of zero under ALiBi: splits whose log-sum-exps lie 300 apart."""
    spec = AttentionSpec(alibi_slopes=(1.0, -1.0, 1e-3, 0.0))
    problem = random_problem([1], [300], spec, num_kv_heads=1)
    check(problem.replace(key_cache=np.zeros_like(problem.key_cache)))


@pytest.mark.parametrize("max_query_len", [1, 32])
def test_padding_of_every_kind(max_query_len):
    rows = [[3, 1, 10**9], [2, -7, -7], [-1, 2**31 - 1, 0]]
    sizes = {"block_tables": rows, "num_blocks": 5, "pad_tokens": 77}
    check(random_problem([1, 1, 0], [8, 3, 0], PLAIN, max_query_len=max_query_len, **sizes))


@pytest.mark.parametrize("query_lens", [[6, 1], [20, 1]])
@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(sliding_window=3), WINDOWED])
def test_more_queries_than_keys(spec, query_lens):
    check(random_problem(query_lens, [3, 0], spec))


@pytest.mark.parametrize("window", [1, 22, 10**9])
def test_windows(window):
    for causal in (True, False):
        check(mixed(AttentionSpec(sliding_window=window, causal=causal)))


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1.0, 300.0])
@pytest.mark.parametrize("fields", [{}, {"logits_soft_cap": 1.0}, {"alibi_slopes": SIGNED}])
def test_scales(scale, fields):
    check(mixed(AttentionSpec(scale=scale, **fields), max_query_len=32))


@pytest.mark.parametrize("cap", [1e-3, 1.0, 1e6])
def test_soft_caps(cap):
    check(mixed(AttentionSpec(logits_soft_cap=cap)))


@pytest.mark.parametrize("max_query_len", [8, 32])
def test_bad_values_stay_inside_the_arrays(max_query_len):
    """Ids, lengths and starts out of their range give some result, from the arrays' own memory."""
    problem = mixed(max_query_len=max_query_len, poison=None)
    tables = torch.tensor(batch_of(problem).block_tables.tolist(), dtype=torch.int32)
    wild = torch.where(torch.arange(tables.shape[1]) % 2 == 0, tables, 2**31 - 1)
    wild[1] = -(2**31)
    out, _ = run(*arrays_of(problem, block_tables=wild), PLAIN)
    assert out.isfinite().all()
    clamped = wild.clamp(0, len(problem.key_cache) - 1)
    want, _ = run(*arrays_of(problem, block_tables=clamped), PLAIN)
    torch.testing.assert_close(out, want, rtol=0, atol=0)
    long = torch.full_like(torch.tensor(problem.seq_lens, dtype=torch.int32), 10**6)
    run(*arrays_of(problem, seq_lens=long, block_tables=clamped), PLAIN)
    starts = torch.tensor([-5, 3, 100, 2, 10**6, 7, 8], dtype=torch.int32)
    run(*arrays_of(problem, query_start_loc=starts), PLAIN)


@pytest.mark.parametrize("max_query_len", [8, 32])
def test_starts_padded_with_zeros(max_query_len):
    """By given tiles, which mend them, and by searched ones, for which they are mended."""
    problem = random_problem(
        [3, 1, 2, 0, 0], [9, 4, 2, 0, 0], PLAIN, pad_tokens=11, max_query_len=max_query_len
    )
    starts = torch.tensor([0, 3, 4, 6, 0, 0], dtype=torch.int32)
    check(problem, query_start_loc=starts)


def test_strides_and_index_types():
    """Planes that are slices of one tensor, a transposed query, int64 metadata."""
    problem = mixed(SPECS["all"], dtype=np.float16)
    query, cache, batch = arrays_of(problem)
    both = torch.full((*cache.key.shape[:3], 2, 24), torch.nan, dtype=torch.float16)
    both[..., 0, :16], both[..., 1, :16] = cache.key, cache.value
    sliced = KVCache(both[..., 0, :16], both[..., 1, :16])
    turned = query.transpose(0, 1).contiguous().transpose(0, 1)
    wide = {name: getattr(batch, name).long() for name in ("block_tables", "seq_lens")}
    wide["block_tables"] = wide["block_tables"].T.contiguous().T
    batch = dataclasses.replace(batch, query_start_loc=batch.query_start_loc.long(), **wide)
    got = paged_attention(turned, sliced, batch, spec=problem.spec, **BY_TRITON)
    assert_attention_close(*got, problem)


@pytest.mark.parametrize("cache_dtype", [None, "int8", "int4"])
def test_options_of_any_strides(cache_dtype):
    kinds = {} if cache_dtype is None else {"cache_dtype": cache_dtype, **TOKENS}
    problem = mixed(arrays=["sinks", "selection"], **kinds)
    query, cache, batch = arrays_of(problem)
    if cache_dtype is not None:
        cache = dataclasses.replace(cache, **{name: apart(getattr(cache, name)) for name in SCALES})
    options = jax.tree.map(lambda array: apart(tensor(array)), problem.arrays)
    assert_attention_close(*run(query, cache, batch, problem.spec, **options), problem)


@pytest.mark.parametrize("cache_dtype", ["int8", "int4"])
def test_planes_at_odd_addresses_are_refused(cache_dtype):
    """A GPU would not go on after one read of a pair of bytes there."""
    problem = mixed(cache_dtype=cache_dtype, **TOKENS)
    query, cache, batch = arrays_of(problem)
    odd = torch.empty(cache.value.numel() + 1, dtype=cache.value.dtype)[1:].view(cache.value.shape)
    with pytest.raises(UnsupportedError, match=r"cache\.value must begin at an even address"):
        run(query, dataclasses.replace(cache, value=odd), batch, problem.spec)


def test_packed_keys():
    rng = np.random.default_rng(0)
    query = rng.standard_normal((15, 4, 16)).astype(np.float32)
    key, value = rng.standard_normal((2, 20, 2, 16)).astype(np.float32)
    key[17:] = value[17:] = query[13:] = np.nan
    starts = np.cumsum([[0, 5, 1, 0, 4, 3], [0, 5, 9, 2, 0, 1]], axis=1).astype(np.int32)
    cache = KVCache(tensor(key)[:, None], tensor(value)[:, None])
    batch = packed_batch(15, *map(tensor, starts), 8, 16)
    got = run(tensor(query), cache, batch, SPECS["all"])
    tables = [range(start, stop) for start, stop in zip(starts[1], starts[1][1:], strict=False)]
    pools = key[:, None], value[:, None]
    lens = np.diff(starts[1])
    want = reference_attention(query, *pools, tables, lens, starts[0], SPECS["all"])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", [(0, 1), (3, 0)])
def test_nothing_to_compute(sizes):
    """No tokens, and tokens that belong to no sequence."""
    num_tokens, num_seqs = sizes
    problem = random_problem([0] * num_seqs, [0] * num_seqs, PLAIN, pad_tokens=num_tokens)
    got = paged_attention(*arrays_of(problem), PLAIN, **BY_TRITON)
    assert_attention_close(*got, problem)


def test_refusals_name_the_reason():
    query, cache, batch = arrays_of(mixed())

    def reasons(query, cache):
        return " ".join(backend.refusals(call_of(query, cache, batch, PLAIN)))

    assert not reasons(query, cache)
    assert "float64" in reasons(query.double(), KVCache(cache.key.double(), cache.value.double()))
    wide = torch.zeros(2, 4, 2, 577)
    assert "head_dim" in reasons(torch.zeros(2, 4, 577), KVCache(wide, wide))
    assert "value_dim must be" in reasons(query, KVCache(cache.key, wide))
    assert "stride 1" in reasons(
        query, KVCache(cache.key, torch.stack([cache.value] * 2, 4)[..., 0])
    )
