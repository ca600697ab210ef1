"""The Triton backend on a CUDA device, from JAX and from torch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from cases import SPECS, mixed, run
from int4_decodes import INT4_DECODES, int4_decodes

import pagedattn_torch
from pagedattn import AttentionSpec, KVCache, paged_attention
from pagedattn._kernels.triton import programs
from pagedattn._kernels.triton.device import device_of
from pagedattn.testing import (
    Problem,
    assert_attention_close,
    attend,
    batch_of,
    cache_of,
    check_backend,
    random_problem,
)
from pagedattn_torch.arrays import batch_on

if not torch.cuda.is_available() or jax.default_backend() != "gpu":
    pytest.skip("needs a CUDA device that both JAX and torch see", allow_module_level=True)
pytest.importorskip("triton")

from pagedattn.backends import triton as jax_backend
from pagedattn.backends.triton import program
from pagedattn_torch.backends import triton as torch_backend

PLAIN = AttentionSpec()
DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16).cuda()
    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def call(problem: Problem, **changes):
    cache = KVCache(tensor(problem.key_cache), tensor(problem.value_cache))
    batch = dataclasses.replace(batch_on(batch_of(problem), "cuda"), **changes)
    return tensor(problem.query), cache, batch, problem.spec


by_triton = functools.partial(pagedattn_torch.paged_attention, backend="triton", return_lse=True)


@pytest.mark.parametrize("jit", [True, False])
def test_every_feature_in_jax(jit):
    cells = check_backend("triton", jit=jit, dtypes=DTYPES if jit else DTYPES[2:])
    results = {cell.result for cell in cells}
    assert "ok" in results
    assert all("bias" in result for result in results - {"ok"}), results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_query_len", [8, 32])
@pytest.mark.parametrize("name", SPECS)
def test_every_feature_in_torch(name, max_query_len, dtype):
    problem = mixed(SPECS[name], dtype=dtype, max_query_len=max_query_len)
    assert_attention_close(*by_triton(*call(problem)), problem)


@pytest.mark.parametrize("block_size", [1, 12, 128])
@pytest.mark.parametrize("head_dim", [24, 80, 128, 256])
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [200, 1, 30]])
def test_sizes(query_lens, head_dim, block_size):
    """Splits, several tiles, few rows beside many; not only the smallest of everything."""
    spec = AttentionSpec(logits_soft_cap=20.0)
    sizes = {"head_dim": head_dim, "block_size": block_size, "dtype": ml_dtypes.bfloat16}
    problem = random_problem(query_lens, [900, 1, 333], spec, num_heads=14, **sizes)
    assert_attention_close(*by_triton(*call(problem)), problem)


@pytest.mark.parametrize("spec", [PLAIN, AttentionSpec(sliding_window=100)])
def test_cuda_graph(spec):
    """Lengths and tables change between replays."""
    problems = [
        random_problem([1] * 4, lens, spec, num_blocks=400, dtype=np.float16, seed=seed)
        for seed, lens in enumerate(([300, 2, 4, 40], [3, 290, 1, 200]))
    ]
    tables = [np.full((4, 75), -1, np.int32) for _ in problems]
    for table, problem in zip(tables, problems, strict=True):
        for row, ids in zip(table, problem.block_tables, strict=True):
            row[: len(ids)] = ids
    query, cache, batch, _ = call(problems[0].replace(block_tables=tables[0]))
    arrays = query, cache, batch, spec
    by_triton(*arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = by_triton(*arrays)
    for problem, table in zip(problems[::-1], tables[::-1], strict=True):
        query.copy_(tensor(problem.query))
        cache.key.copy_(tensor(problem.key_cache))
        cache.value.copy_(tensor(problem.value_cache))
        batch.seq_lens.copy_(torch.tensor(problem.seq_lens))
        batch.block_tables.copy_(torch.from_numpy(table))
        graph.replay()
        assert_attention_close(*results, problem)


@pytest.mark.parametrize("max_query_len", [1, 17])
@pytest.mark.parametrize("scale", [1.0, -0.5])
def test_sizes_of_one_in_jax(scale, max_query_len):
    """No scalar becomes a constant of the program when it is 1."""
    spec = AttentionSpec(scale=scale, sliding_window=1, alibi_slopes=(1.0,))
    sizes = {"num_heads": 1, "num_kv_heads": 1, "num_blocks": 1, "block_size": 1}
    problem = random_problem([1], [1], spec, max_query_len=max_query_len, **sizes)
    assert_attention_close(*attend(problem, backend="triton", jit=True), problem)


def test_inside_scan_and_grad():
    problem = mixed(SPECS["all"], poison=None)
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    attend = functools.partial(paged_attention, batch=batch, spec=problem.spec)

    def layers(query, cache, backend):
        def layer(x, scale):
            return attend(x * scale, cache, backend=backend), None

        return jax.lax.scan(layer, query, jnp.array([1.0, 0.5]))[0].sum()

    got, want = (
        jax.jit(jax.value_and_grad(layers, (0, 1)), static_argnums=2)(query, cache, name)
        for name in ("triton", "xla")
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-4), got, want)


@pytest.mark.parametrize("query_lens", [[1, 1], [40, 1]])
def test_a_cache_of_more_than_two_to_the_31_elements(query_lens):
    sizes = {"head_dim": 128, "num_kv_heads": 8, "num_heads": 16, "block_size": 16}
    problem = random_problem(query_lens, [700, 44], PLAIN, dtype=np.float16, **sizes)
    query, cache, batch, spec = call(problem)
    far = (1 << 31) // cache.key[0].numel() + 5
    planes = []
    for plane in (cache.key, cache.value):
        big = torch.empty(far + len(plane), *plane.shape[1:], dtype=plane.dtype, device="cuda")
        big[far:] = plane
        planes.append(big)
    moved = dataclasses.replace(batch, block_tables=batch.block_tables + far)
    assert_attention_close(*by_triton(query, KVCache(*planes), moved, spec), problem)


@pytest.mark.parametrize("query_lens", [[1, 1, 1], [20, 1, 3]])
def test_bad_values_stay_inside_the_arrays(query_lens):
    """The cache lies between guards of NaN; ids, lengths and starts are out of their range."""
    problem = random_problem(query_lens, [90, 50, 7], PLAIN, poison=None)
    query, cache, batch, spec = call(problem)
    guarded = []
    for plane in (cache.key, cache.value):
        room = torch.full((3 * len(plane), *plane.shape[1:]), torch.nan, device="cuda")
        room[len(plane) : 2 * len(plane)] = plane
        guarded.append(room[len(plane) : 2 * len(plane)])
    wild = torch.full_like(batch.block_tables, 2**31 - 1)
    wild[:, ::2], wild[1] = len(cache.key), -3
    long = torch.full_like(batch.seq_lens, 10**6)
    bad = dataclasses.replace(batch, block_tables=wild, seq_lens=long)
    out, lse = by_triton(query, KVCache(*guarded), bad, spec)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    starts = torch.tensor([-5, 30, 10**6, 7], dtype=torch.int32, device="cuda")
    by_triton(query, KVCache(*guarded), dataclasses.replace(bad, query_start_loc=starts), spec)
    torch.cuda.synchronize()


@pytest.fixture(params=[(8, 9), (8, 0)], ids=["L4", "A100"])
def limits(request, monkeypatch):
    """Launches are chosen as for a smaller GPU, whose limits this one has too."""
    device = device_of({(8, 9): 58, (8, 0): 108}[request.param], request.param)
    monkeypatch.setattr(jax_backend, "_device", lambda: device)
    monkeypatch.setattr(torch_backend, "_device", lambda _: device)
    jax_backend.run.clear_cache()  # of calls that were traced for this GPU
    yield device
    jax_backend.run.clear_cache()


LATENT = {"head_dim": 576, "value_dim": 512, "latent": True, "num_heads": 32, "num_kv_heads": 1}
SMALLER = [
    ([1] * 3, {"head_dim": 128}),
    ([8, 1, 3], {"head_dim": 256}),
    ([300, 1, 40], {"head_dim": 128}),  # eight warps, where this GPU takes four
    ([300, 1, 40], {"head_dim": 256}),
    ([1100, 1024], {"head_dim": 128}),  # 128 rows, where it takes 256
    ([1, 5, 1], LATENT),
    ([70, 1, 1], {"head_dim": 512}),
]


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("query_lens", "sizes"), SMALLER, ids=str)
def test_within_the_limits_of_smaller_gpus(limits, query_lens, sizes, dtype):
    """From JAX, and that the programs took no more memory than those GPUs have."""
    key_lens = [length + extra for length, extra in zip(query_lens, (900, 0, 333), strict=False)]
    sizes = {"num_heads": 16, "num_kv_heads": 2, "block_size": 16, "dtype": dtype} | sizes
    problem = random_problem(query_lens, key_lens, AttentionSpec(logits_soft_cap=20.0), **sizes)
    shared = []
    compiled = program._compiled

    def compile_one(*described):
        code = compiled(*described)
        shared.append(code.metadata.shared)
        return code

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_compiled", compile_one)
        results = attend(problem, backend="triton")
    assert_attention_close(*results, problem)
    assert 0 < max(shared) <= limits.shared_bytes


@pytest.mark.parametrize("name", SPECS)
def test_every_feature_within_the_limits_of_smaller_gpus(limits, name):
    problem = mixed(SPECS[name], dtype=np.float16, max_query_len=32)
    assert_attention_close(*by_triton(*call(problem)), problem)


def test_new_sizes_do_not_recompile():
    def compiled():
        from pagedattn._kernels.triton.attention import attention_kernel as kernel

        return sum(len(cache[0]) for cache in kernel.device_caches.values())

    def decode(lens, **sizes):
        by_triton(*call(random_problem([1] * len(lens), lens, PLAIN, max_query_len=1, **sizes)))

    decode([100, 30, 9])
    before = compiled()
    decode([100, 30, 9], num_blocks=128)
    decode([16] * 16 + [90])
    decode([101], num_blocks=1000)
    assert compiled() == before


@pytest.mark.parametrize("name", INT4_DECODES)
def test_int4_decodes_of_few_keys(monkeypatch, name):
    """By the kernel that `backend=None` takes where there are keys for all its warps."""
    monkeypatch.setattr(programs, "INT4_DECODE_KEYS", 0)
    jax_backend.run.clear_cache()
    problem = int4_decodes(name)
    assert_attention_close(*run(problem, "triton"), problem, name="triton")
    jax_backend.run.clear_cache()
