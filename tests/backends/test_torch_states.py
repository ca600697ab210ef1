"""What torch keeps for a whole thread changes no result: autocast, default dtype and device, ..."""

import contextlib
import copy
import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import BACKENDS, SPECS, mixed, random_cache, rows, run
from pagedattn_interop import to_torch
from pagedattn_interop.backends import takes
from tensors import by_torch, tensors
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from pagedattn import InvalidInputError, KVCache, UnsupportedError, make_batch
from pagedattn._dispatch.registry import Framework, can_load, order
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem
from pagedattn_torch import (
    copy_blocks_,
    explain,
    paged_attention,
    prepare,
    ragged_attention,
    write_kv_,
)

DEVICE = to_torch(jnp.zeros(1)).device.type
BY_TORCH = [
    name for name in order(Framework.TORCH) if name in BACKENDS and can_load(name, Framework.TORCH)
]


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES = {
    "autocast to bfloat16": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "autocast to float16": lambda: torch.autocast(DEVICE, torch.float16),
    "another default device": lambda: torch.device("meta"),
    "default float64": lambda: default_dtype(torch.float64),
    "default bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
    "deterministic": deterministic,
}
PROBLEMS = {
    "all": lambda: mixed(SPECS["all"], arrays=("sinks",)),
    "bias": lambda: mixed(arrays=("bias",)),
    "window": lambda: mixed(SPECS["sliding_window"]),
    "quantised": lambda: mixed(cache_dtype="int8"),
    "long": lambda: random_problem([40, 1], [44, 9], SPECS["plain"]),
}


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("backend", BY_TORCH)
def test_tensors(backend, state, problem):
    problem = PROBLEMS[problem]()
    if problem.bias is not None and backend == "triton":
        pytest.skip("triton has no biases")
    with STATES[state]():
        results = by_torch(problem, backend)
    assert_attention_close(*results, problem, name=f"{backend}, {state}")


@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("state", STATES)
def test_arrays_that_cross_to_torch(state, mode):
    problem = mixed(SPECS["all"], arrays=("sinks",))
    with STATES[state]():
        results = run(problem, "sdpa", mode)
    assert_attention_close(*results, problem, name=state)


@pytest.mark.parametrize("state", STATES)
def test_writes_and_copies(state):
    """Into a cache that was made before, in floats and in eight bits."""
    floats = random_cache()
    key, value = tensors(rows(3, floats))
    slots, ids = np.array([0, 9, -1]), np.array([2, 3])
    whole = tensors(floats)
    eight = KVCache(*(torch.zeros(9, 4, 2, 8, dtype=torch.int8, device=key.device) for _ in "kv"))
    eight = dataclasses.replace(eight, key_scale=torch.tensor([0.1, 0.2], device=key.device))
    for cache in (whole, eight):
        want = copy.deepcopy(cache)
        copy_blocks_(write_kv_(want, key, value, slots), ids, ids[::-1])
        with STATES[state]():
            copy_blocks_(write_kv_(cache, key, value, slots), ids, ids[::-1])
        for got, expected in zip(cache.planes, want.planes, strict=True):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("state", STATES)
def test_packed_keys(state):
    query, key = tensors((jnp.ones((5, 4, 8)), jnp.ones((5, 2, 8))))
    starts = np.array([0, 3, 5])
    with STATES[state]():
        out = ragged_attention(
            query, key, key, starts, starts, max_query_len=3, max_key_len=3, backend="sdpa"
        )
    assert out.device == query.device
    torch.testing.assert_close(out, torch.ones_like(query))


def test_whether_torch_takes_a_dtype_is_asked_of_no_default_device():
    takes.cache_clear()
    with torch.device("meta"):
        assert takes("float32")


def call():
    """query, cache, batch and the other arrays of a call, as tensors."""
    problem = mixed(cache_dtype="int8", arrays=("sinks", "bias"))
    query, arrays = tensors(jax.tree.map(jnp.asarray, (problem.query, problem.arrays)))
    return query, tensors(cache_of(problem)), batch_of(problem), arrays


@pytest.mark.parametrize("backend", [*BY_TORCH, None])
@pytest.mark.parametrize("name", ["query", "key", "value", "sinks", "bias"])
def test_lazy_negations_are_refused_by_name(name, backend):
    """Kernels that are given addresses would read them with the wrong sign."""
    query, cache, batch, arrays = call()
    cache = KVCache(*(torch.ones_like(plane, dtype=query.dtype) for plane in cache.planes))
    given = {"query": query, "key": cache.key, "value": cache.value} | arrays
    given[name] = torch._neg_view(given[name])
    query, cache = given.pop("query"), KVCache(given.pop("key"), given.pop("value"))
    with pytest.raises(InvalidInputError, match=f"{name} is negated lazily"):
        paged_attention(query, cache, batch, backend=backend, **given)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="needs a CPU")
@pytest.mark.parametrize("backend", ["numba", "sdpa"])
def test_a_recorded_graph_does_not_lack_the_kernel(backend):
    """make_fx gave a graph that returned uninitialised memory, and for sdpa torch's own error."""
    if not can_load(backend):
        pytest.skip(f"needs {backend}")
    query, cache, batch, _ = call()
    cache = KVCache(*(torch.ones_like(plane, dtype=query.dtype) for plane in cache.planes))
    step = prepare(query, cache, batch, backend=backend)
    for record in (
        lambda x: step.attend(x, cache)[0],
        lambda x: paged_attention(x, cache, batch, backend=backend),
    ):
        with pytest.raises(UnsupportedError, match="make_fx"):
            make_fx(record)(query)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="functional tensors of a CPU")
@pytest.mark.parametrize("backend", ["sdpa", None])
def test_functional_tensors_go_to_torchs_own_operations(backend):
    query, cache, batch, _ = call()
    planes = [torch.randn(plane.shape, dtype=query.dtype) for plane in cache.planes]
    want = paged_attention(query, KVCache(*planes), batch, backend="sdpa")
    fake = query, KVCache(*map(torch._to_functional_tensor, planes)), batch
    with pytest.raises(InvalidInputError, match="must all have memory"):
        paged_attention(*fake, backend=backend)
    fake = torch._to_functional_tensor(query), *fake[1:]
    if can_load("numba"):
        assert explain(*fake)["numba"] == ["fake_tensors: numba does not have it"]
    got = paged_attention(*fake, backend=backend)
    torch._sync(got)  # applies what was written through views of it
    torch.testing.assert_close(torch._from_functional_tensor(got), want)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused():
    query, cache, batch, _ = call()
    nested = torch.nested.nested_tensor([query[:2], query[2:]])
    with pytest.raises(InvalidInputError, match=r"query must be a dense tensor.*nested"):
        paged_attention(nested, cache, batch)


@pytest.mark.parametrize("name", ["key_scale", "value_scale"])
def test_gradients_of_scales_are_refused(name):
    query, cache, batch, _ = call()
    scale = getattr(cache, name).clone().requires_grad_()
    cache = dataclasses.replace(cache, **{name: scale})
    with pytest.raises(UnsupportedError, match="gradients"):
        paged_attention(query, cache, batch)
    with torch.no_grad():
        assert paged_attention(query, cache, batch).shape == query.shape


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of make_dual
@pytest.mark.parametrize("name", ["query", "key"])
@pytest.mark.parametrize("backend", BY_TORCH)
def test_tangents_are_refused(backend, name):
    """Forward mode: kernels that are given addresses would lose them without a word."""
    problem = mixed(SPECS["plain"])
    query, cache = tensors((jnp.asarray(problem.query), cache_of(problem)))

    def attend(x):
        arrays = {"query": query, "key": cache.key, "value": cache.value} | {name: x}
        cached = KVCache(arrays["key"], arrays["value"])
        return paged_attention(arrays["query"], cached, batch_of(problem), backend=backend)

    x = query if name == "query" else cache.key
    with pytest.raises(UnsupportedError, match="gradients"), forward_ad.dual_level():
        attend(forward_ad.make_dual(x, torch.ones_like(x)))
    with pytest.raises(UnsupportedError, match="gradients"):
        torch.func.jvp(attend, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level():
        assert attend(x).shape == query.shape


@pytest.mark.parametrize("backend", BY_TORCH)
def test_compiled_programs_call_out(backend):
    """torch.compile computes around a call, does not look inside, and compiles nothing anew.

    Older versions of torch compile what is around it again for other lengths.
    """
    programs, counts = [], []

    def counted(graph, _):
        programs.append(graph)
        return graph.forward

    def step(query, cache, batch, arrays):
        write_kv_(cache, query[:0, :2], query[:0, :2], torch.zeros(0, dtype=torch.int32))
        ready = prepare(query + 0, cache, batch, backend=backend, **arrays)
        return paged_attention(query + 0, cache, batch, backend=backend, **arrays) * 1, ready

    compiled = torch.compile(step, backend=counted)
    for cut in (0, 1, 2):
        problem = mixed(arrays=("sinks",), seed=cut).replace(seq_lens=[6, 19, 22 - cut, 9, 5, 0])
        tree = problem.query, problem.arrays
        query, arrays = tensors(jax.tree.map(jnp.asarray, tree))
        cache = tensors(cache_of(problem))
        out, ready = compiled(query, cache, batch_of(problem), arrays)
        assert_attention_close(out, None, problem, name=backend)
        out, _ = ready.attend(query, cache, **arrays)
        assert_attention_close(out, None, problem, name=backend)
        counts.append(len(programs))
    assert counts[0] > 0
    assert torch.__version__ < (2, 13) or counts[0] == counts[2]
    with pytest.raises(torch._dynamo.exc.Unsupported, match="kernels that cannot be traced"):
        torch.compile(step, fullgraph=True)(query, cache, batch_of(problem), arrays)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("backend", BY_TORCH)
def test_a_step_is_not_copied(backend, copied):
    """What it holds addresses of would be gone."""
    query, cache, batch, _ = call()
    step = prepare(query, cache, batch, backend=backend)
    with pytest.raises(UnsupportedError, match="prepare again"):
        copied(step)


@pytest.mark.parametrize("num_seqs", [0, 2])
@pytest.mark.parametrize("names", [(), ("sinks",), ("bias",), ("sinks", "bias")])
@pytest.mark.parametrize("backend", [*BY_TORCH, "xla"])
def test_options_of_a_call_without_queries(backend, names, num_seqs):
    problem = random_problem([0] * num_seqs, [0] * num_seqs, SPECS["plain"], arrays=names)
    if "bias" in names and backend == "triton":
        pytest.skip("triton has no biases")
    results = by_torch(problem, backend) if backend != "xla" else run(problem, backend)
    assert_attention_close(*results, problem, name=backend)


def test_meta_tensors_may_be_views():
    """Their address is their offset."""
    batch = make_batch([1], [4], [[1, 0]], block_size=4)
    planes = torch.zeros(2, 2, 4, 1, 8, device="meta")
    query = torch.zeros(3, 1, 2, 8, device="meta")[2]
    assert paged_attention(query, KVCache(*planes), batch).shape == (1, 2, 8)
