"""The functions on torch tensors: the oracle's answers, in-place writes, strided caches."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from cases import SPECS, mixed, problems_for, random_cache, rows, run
from hypothesis import given
from pagedattn_interop import to_torch
from tensors import interleaved, tensors

from pagedattn import InvalidInputError, KVCache, UnsupportedError
from pagedattn.testing import (
    assert_attention_close,
    batch_of,
    cache_of,
    random_problem,
    reference_attention,
    reference_write,
)
from pagedattn.testing.strategies import any_phase
from pagedattn_torch import copy_blocks_, paged_attention, ragged_attention, swap_blocks_, write_kv_
from pagedattn_torch.arrays import int32


def torch_cache(seed: int = 0, num_blocks: int = 9) -> KVCache:
    return to_torch(random_cache(num_blocks, seed=seed), copy=True)


def numpy_of(cache: KVCache) -> tuple[np.ndarray, np.ndarray]:
    return cache.key.cpu().numpy().copy(), cache.value.cpu().numpy().copy()


def attend(problem, **options):
    arrays = jax.tree.map(jnp.asarray, (problem.query, problem.arrays))
    (query, arrays), cache = tensors((arrays, cache_of(problem)))
    return paged_attention(query, cache, batch_of(problem), problem.spec, **arrays, **options)


@given(problem=problems_for("sdpa", any_phase))
def test_matches_the_oracle(problem):
    out, lse = attend(problem, backend="sdpa", return_lse=True)
    assert_attention_close(out, lse, problem, name="torch")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_is_what_jax_gets(name, dtype):
    """The same kernel behind both doors, to the bit; with and without lse the same out."""
    problem = mixed(SPECS[name], dtype=dtype)
    out, lse = attend(problem, backend="sdpa", return_lse=True)
    assert (out.dtype, lse.dtype) == (to_torch(jnp.asarray(problem.query)).dtype, torch.float32)
    want = run(problem, "sdpa", "eager")
    np.testing.assert_array_equal(out.float().cpu().numpy(), want[0].astype(np.float32))
    np.testing.assert_array_equal(lse.cpu().numpy(), want[1])
    assert_attention_close(attend(problem, backend="sdpa"), None, problem, name="without lse")


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_batches_of_torch_tensors(dtype):
    problem = mixed(SPECS["all"])
    batch = jax.tree.map(lambda x: to_torch(x, copy=True).to(dtype), batch_of(problem))
    query, cache = to_torch((jnp.asarray(problem.query), cache_of(problem)), copy=True)
    got = paged_attention(query, cache, batch, problem.spec)
    assert_attention_close(got, None, problem)


@pytest.mark.parametrize("name", SPECS)
def test_ragged(name):
    rng = np.random.default_rng(0)
    query = rng.standard_normal((9, 4, 16)).astype(np.float32)
    key, value = rng.standard_normal((2, 12, 2, 16)).astype(np.float32)
    query_starts, key_starts = np.array([0, 5, 6, 6, 9]), np.array([0, 5, 10, 12, 12])
    arrays = [
        to_torch(jnp.asarray(x), copy=True) for x in (query, key, value, query_starts, key_starts)
    ]
    out, lse = ragged_attention(
        *arrays, SPECS[name], max_query_len=5, max_key_len=5, return_lse=True
    )
    tables = [range(start, stop) for start, stop in itertools.pairwise(key_starts)]
    planes = key[:, None], value[:, None]
    want = reference_attention(
        query, *planes, tables, np.diff(key_starts), query_starts, SPECS[name]
    )
    np.testing.assert_allclose(out.cpu(), want[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse.cpu(), want[1], rtol=1e-5, atol=1e-5)


SLOTS = [[0, 35, 4], [-1, 5, -1], [-1, -1, -1], [35, -1, 0]]


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_write_in_place(slots, dtype):
    cache = torch_cache()
    key, value = to_torch(rows(3, random_cache()), copy=True)
    want = reference_write(*numpy_of(cache), key.cpu().numpy(), value.cpu().numpy(), slots)
    before = cache.key.data_ptr(), cache.value.data_ptr()
    out = write_kv_(cache, key, value, torch.tensor(slots, dtype=dtype, device=key.device))
    assert out.key is cache.key
    assert out.value is cache.value
    assert (cache.key.data_ptr(), cache.value.data_ptr()) == before
    np.testing.assert_array_equal(numpy_of(cache)[0], want[0])
    np.testing.assert_array_equal(numpy_of(cache)[1], want[1])


def test_dropped_rows_may_hold_nan():
    cache = torch_cache()
    key, value = to_torch(rows(3, random_cache()), copy=True)
    key[1] = value[1] = torch.nan
    write_kv_(cache, key, value, torch.tensor([4, -1, 6], device=key.device))
    assert cache.key.isfinite().all()
    assert cache.value.isfinite().all()


def test_no_tokens():
    cache = torch_cache()
    before = numpy_of(cache)
    key, value = to_torch(rows(0, random_cache()), copy=True)
    write_kv_(cache, key, value, torch.zeros(0, dtype=torch.int32))
    np.testing.assert_array_equal(numpy_of(cache)[0], before[0])


def by_head(cache: KVCache) -> KVCache:
    """The same values with heads outside of slots in memory."""
    return KVCache(
        *(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (cache.key, cache.value))
    )


LAYOUTS = {"interleaved": interleaved, "by head": by_head}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_caches_are_written_in_place(layout):
    cache = LAYOUTS[layout](torch_cache())
    assert not cache.key.is_contiguous()
    key, value = to_torch(rows(3, random_cache()), copy=True)
    want = reference_write(*numpy_of(cache), key.cpu().numpy(), value.cpu().numpy(), [9, -1, 0])
    write_kv_(cache, key, value, torch.tensor([9, -1, 0], device=key.device))
    copy_blocks_(cache, torch.tensor([2]), torch.tensor([5]))
    for half, plane in zip(numpy_of(cache), want, strict=True):
        plane[5] = plane[2]
        np.testing.assert_array_equal(half, plane)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_caches_are_read_right(layout):
    problem = mixed(SPECS["all"])
    query, cache = to_torch((jnp.asarray(problem.query), cache_of(problem)), copy=True)
    cache = LAYOUTS[layout](cache)
    got = paged_attention(query, cache, batch_of(problem), problem.spec, return_lse=True)
    assert_attention_close(*got, problem)


def test_strided_queries_are_read_right():
    problem = mixed(SPECS["all"])
    query, cache = to_torch((jnp.asarray(problem.query), cache_of(problem)), copy=True)
    fused = torch.stack([query, query], dim=1)[:, 0]
    got = paged_attention(fused, cache, batch_of(problem), problem.spec, return_lse=True)
    assert_attention_close(*got, problem)


def test_copy_blocks_reads_before_it_writes():
    cache = torch_cache()
    old = numpy_of(cache)
    out = copy_blocks_(cache, torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))
    assert out.key is cache.key
    for half, before in zip(numpy_of(cache), old, strict=True):
        np.testing.assert_array_equal(half[[1, 2, 0]], before[[0, 1, 2]])
        np.testing.assert_array_equal(half[3:], before[3:])


def test_block_minus_one_copies_nothing():
    cache = torch_cache()
    old = numpy_of(cache)
    copy_blocks_(cache, torch.tensor([-1, 2, -1, 4]), torch.tensor([0, -1, -1, 5]))
    for half, before in zip(numpy_of(cache), old, strict=True):
        before[5] = before[4]
        np.testing.assert_array_equal(half, before)


def test_swap_blocks_copies_between_pools():
    source, target = torch_cache(3), torch_cache(4, num_blocks=5)
    host = KVCache(target.key.cpu(), target.value.cpu())
    old = numpy_of(host)
    before = host.key.data_ptr()
    out = swap_blocks_(source, host, torch.tensor([8, 0]), torch.tensor([1, 4]))
    assert out.key.data_ptr() == before
    for half, given_, rest in zip(numpy_of(host), numpy_of(source), old, strict=True):
        np.testing.assert_array_equal(half[[1, 4]], given_[[8, 0]])
        np.testing.assert_array_equal(half[[0, 2, 3]], rest[[0, 2, 3]])


def test_attention_leaves_its_inputs_alone():
    problem = mixed(SPECS["all"])
    query, cache = to_torch((jnp.asarray(problem.query), cache_of(problem)), copy=True)
    before = query.clone(), cache.key.clone(), cache.value.clone()
    out = paged_attention(query, cache, batch_of(problem), problem.spec)
    for now, then in zip((query, cache.key, cache.value), before, strict=True):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))
    assert not out.requires_grad


def test_gradients_are_refused():
    problem = random_problem([1], [5], SPECS["plain"])
    query, cache = to_torch((jnp.asarray(problem.query), cache_of(problem)), copy=True)
    with pytest.raises(UnsupportedError, match="gradient"):
        paged_attention(query.requires_grad_(), cache, batch_of(problem))


INTEGERS = [torch.int8, torch.int16, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
def test_batches_of_any_integers(dtype):
    """Their differences must not wrap, and torch computes none of most unsigned integers."""
    problem = random_problem([3, 1, 2], [3, 9, 100], SPECS["all"])
    batch = batch_of(problem)
    names = ("block_tables", "seq_lens", "query_start_loc", "positions")
    fields = {name: to_torch(getattr(batch, name)).clamp(min=0).to(dtype) for name in names}
    query, cache = to_torch((jnp.asarray(problem.query), cache_of(problem)), copy=True)
    got = paged_attention(query, cache, dataclasses.replace(batch, **fields), problem.spec)
    assert_attention_close(got, None, problem)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_ragged_starts_of_any_integers(dtype):
    x = torch.randn(100, 2, 8)
    starts = torch.tensor([0, 40, 100])
    options = {"max_query_len": 60, "max_key_len": 60}
    got = ragged_attention(x, x, x, starts.to(dtype), starts.to(dtype), **options)
    assert torch.equal(got, ragged_attention(x, x, x, starts, starts, **options))


def test_int32_of_what_does_not_fit():
    wide = torch.tensor([0, 7, -3, 2**31, 2**32 + 1])
    assert int32(wide).tolist() == [0, 7, -3, -1, -1]
    assert int32(torch.tensor([-5]).view(torch.uint64)).tolist() == [-1]
    same = torch.zeros(2, dtype=torch.int32)
    assert int32(same) is same
    assert int32(torch.ones(1)).dtype is torch.float32  # for the checks to refuse


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("convert", [jnp.asarray, np.asarray, lambda x: np.asarray(jnp.asarray(x))])
def test_ids_of_any_framework(convert):
    cache, want = torch_cache(), torch_cache()
    key, value = to_torch(rows(3, random_cache()), copy=True)
    write_kv_(cache, key, value, convert([9, -1, 0]))
    write_kv_(want, key, value, torch.tensor([9, -1, 0]))
    copy_blocks_(cache, convert([2, 0]), convert([5, 1]))
    copy_blocks_(want, torch.tensor([2, 0]), torch.tensor([5, 1]))
    for half, other in zip(numpy_of(cache), numpy_of(want), strict=True):
        np.testing.assert_array_equal(half, other)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_slots_and_blocks_of_any_integers(dtype):
    cache = torch_cache()
    old = numpy_of(cache)
    key, value = to_torch(rows(2, random_cache()), copy=True)
    write_kv_(cache, key, value, torch.tensor([3, 0], dtype=dtype))
    copy_blocks_(cache, torch.tensor([4, 5], dtype=dtype), torch.tensor([5, 4], dtype=dtype))
    for half, before, new in zip(numpy_of(cache), old, (key, value), strict=True):
        np.testing.assert_array_equal(half.reshape(-1, *half.shape[2:])[[3, 0]], new.cpu())
        np.testing.assert_array_equal(half[[5, 4]], before[[4, 5]])


NO_TENSORS = {
    "slots as a list": (lambda c, k, v: write_kv_(c, k, v, [0, 1]), "slot_mapping"),
    "float slots": (lambda c, k, v: write_kv_(c, k, v, torch.zeros(2)), "slot_mapping"),
    "a JAX cache": (
        lambda c, k, v: write_kv_(random_cache(), k, v, torch.arange(2)),
        "cache's key",
    ),
    "a tensor as cache": (lambda c, k, v: write_kv_(c.key, k, v, torch.arange(2)), "KVCache"),
    "a NumPy key": (lambda c, k, v: write_kv_(c, k.cpu().numpy(), v, torch.arange(2)), "key"),
    "blocks as lists": (lambda c, k, v: copy_blocks_(c, [0], [1]), "src"),
    "a JAX pool": (
        lambda c, k, v: copy_blocks_(random_cache(), jnp.ones(1, int), k),
        "cache's key",
    ),
    "starts as lists": (
        lambda c, k, v: ragged_attention(k, k, v, [0, 2], [0, 2], max_query_len=2, max_key_len=2),
        "query_start_loc",
    ),
}


@pytest.mark.parametrize("name", NO_TENSORS)
def test_what_is_no_tensor_is_named(name):
    call, word = NO_TENSORS[name]
    cache = torch_cache()
    before = numpy_of(cache)
    key, value = to_torch(rows(2, random_cache()), copy=True)
    with pytest.raises(InvalidInputError, match=word):
        call(cache, key, value)
    np.testing.assert_array_equal(numpy_of(cache)[0], before[0])


def test_writes_are_detached():
    cache = torch_cache()
    key, value = to_torch(rows(2, random_cache()), copy=True)
    write_kv_(cache, key.requires_grad_(), value, torch.tensor([0, 5], device=key.device))
    leaf = KVCache(cache.key.clone().requires_grad_(), cache.value)
    swap_blocks_(leaf, cache, torch.tensor([0]), torch.tensor([2]))
    assert not cache.key.requires_grad
    assert torch.equal(cache.key.flatten(0, 1)[5], key[1])
    assert torch.equal(cache.key[2], cache.key[0])
