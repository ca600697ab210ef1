"""Arrays that cross without a copy, proved by pointer, and torch functions inside jit."""

import concurrent.futures
import importlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import as_numpy, random_cache, rows
from pagedattn_interop import to_jax, to_torch, torch_call
from quickest import best_time

from pagedattn import InvalidInputError, KVCache
from pagedattn.testing import reference_write

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8, jnp.uint8)
DEVICE = to_torch(jnp.zeros(1)).device  # torch's name of the device that JAX uses


def pointer(array) -> int:
    if isinstance(array, torch.Tensor):
        return array.data_ptr()
    return array.unsafe_buffer_pointer()


def shape_of(array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_crossing_keeps_the_pointer_and_the_dtype(dtype):
    array = jnp.arange(24).reshape(2, 3, 4).astype(dtype)
    tensor = to_torch(array)
    assert pointer(tensor) == pointer(array)
    assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
    back = to_jax(tensor)
    assert pointer(back) == pointer(array)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(np.asarray(back), np.asarray(array))


def test_torch_memory_reaches_jax():
    tensor = on_device(torch.randn(64, 64))
    array = to_jax(tensor)
    assert pointer(array) == pointer(tensor)
    assert isinstance(array, jax.Array)
    np.testing.assert_array_equal(np.asarray(array), tensor.cpu().numpy())


def test_memory_outlives_the_tensor():
    array = to_jax(on_device(torch.full((1000,), 3.0)))
    for _ in range(10):
        on_device(torch.full((1000,), -1.0))
    assert float(array.sum()) == 3000.0


def test_pytrees_cross_whole():
    cache = random_cache()
    tensors = to_torch({"layers": [cache]})
    assert isinstance(tensors["layers"][0], KVCache)
    assert pointer(tensors["layers"][0].value) == pointer(cache.value)
    back = to_jax(tensors)["layers"][0]
    assert pointer(back.key) == pointer(cache.key)


def test_pending_results_are_waited_for():
    big = jnp.ones((600, 600))
    product = jax.jit(lambda x: (x @ x) @ (x @ x))(big)
    assert float(to_torch(product)[5, 7]) == 600.0**3


PERMUTED = {
    "transposed": lambda t: t.mT,
    "four axes": lambda t: t.view(2, 16, 4, 8).permute(2, 0, 3, 1),
    "one row": lambda t: t[:1].mT,
    "none": lambda t: t[:0].mT,
}


@pytest.mark.parametrize("name", PERMUTED)
def test_permuted_tensors_are_shared(name):
    """There and back, and as the argument of a program: JAX keeps the order of axes in memory."""
    tensor = PERMUTED[name](on_device(torch.arange(1024.0).reshape(32, 32)))
    array = to_jax(tensor)
    if tensor.numel():
        assert pointer(array) == pointer(to_torch(array)) == pointer(tensor)
    np.testing.assert_array_equal(np.asarray(array), tensor.cpu().numpy())
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(array), tensor.cpu() + 1)
    doubled = torch_call(lambda x: x * 2, shape_of(array))
    np.testing.assert_array_equal(jax.jit(doubled)(array), tensor.cpu() * 2)
    assert to_torch(array).shape == tensor.shape


STRIDED = {
    "every second row": lambda t: t[::2],
    "a column block": lambda t: t[:, 8:16],
    "a broadcast row": lambda t: t[:1].expand(8, 32),
}


@pytest.mark.parametrize("name", STRIDED)
def test_strided_tensors_are_refused_unless_copied(name):
    tensor = STRIDED[name](on_device(torch.arange(1024.0).reshape(32, 32)))
    with pytest.raises(InvalidInputError, match=r"contiguous.*copy=True"):
        to_jax(tensor)
    array = to_jax(tensor, copy=True)
    assert pointer(array) != pointer(tensor)
    np.testing.assert_array_equal(np.asarray(array), tensor.cpu().numpy())


WIDE = (torch.int64, torch.uint64, torch.float64, torch.complex128)


@pytest.mark.parametrize("dtype", WIDE, ids=str)
def test_64_bits_are_shared_whole_or_refused(dtype):
    tensor = on_device(torch.arange(8).to(dtype))
    with pytest.raises(InvalidInputError, match=r"convert.*copy=True.*jax_enable_x64"):
        to_jax(tensor)
    copied = to_jax(tensor, copy=True)
    assert copied.dtype.itemsize == tensor.element_size() // 2
    np.testing.assert_array_equal(np.asarray(copied), tensor.cpu().numpy())
    with jax.enable_x64(True):
        array = to_jax(tensor)
        assert pointer(array) == pointer(tensor)
        assert str(tensor.dtype).removeprefix("torch.") == array.dtype.name
        assert pointer(to_torch(array)) == pointer(tensor)


@pytest.mark.parametrize("value", [2**40, -(2**31) - 1, 2**31])
def test_integers_that_32_bits_do_not_hold_are_never_shortened(value):
    tensor = on_device(torch.tensor([value, -1]))
    for copy in (False, True):
        with pytest.raises(InvalidInputError, match="jax_enable_x64"):
            to_jax(tensor, copy=copy)
    with jax.enable_x64(True):
        assert to_jax(tensor, copy=True).tolist() == [value, -1]


def test_lazy_negations_and_conjugates_are_not_dropped():
    """Torch keeps them as a bit, which the exchanged memory does not have."""
    tensor = on_device(torch.arange(8.0))
    for lazy in (torch._neg_view(tensor), torch.complex(tensor, tensor).conj()):
        with pytest.raises(InvalidInputError):
            to_jax(lazy)
        np.testing.assert_array_equal(to_jax(lazy, copy=True), np.array(lazy.cpu().tolist()))


@pytest.mark.parametrize("offset", [1, 2, 3, 8, 16])
def test_unaligned_tensors_are_never_copied_silently(offset):
    """XLA wants aligned memory: shared by pointer, or refused with a word on copy=True."""
    tensor = on_device(torch.arange(100.0))[offset:]
    try:
        array = to_jax(tensor)
    except InvalidInputError:
        with pytest.raises(InvalidInputError, match="copy=True"):
            to_jax(tensor)
        array = to_jax(tensor, copy=True)
    else:
        assert pointer(array) == pointer(tensor)
    np.testing.assert_array_equal(np.asarray(array), tensor.cpu().numpy())


def test_copies_share_nothing():
    array = jnp.arange(8.0)
    tensor = to_torch(array, copy=True)
    tensor += 1
    assert array.tolist() == list(range(8))
    again = to_jax(tensor, copy=True)
    tensor += 1
    assert again.tolist() == list(range(1, 9))


def test_tensors_that_require_grad_cross():
    tensor = on_device(torch.ones(4)).requires_grad_()
    assert pointer(to_jax(tensor)) == pointer(tensor)


@pytest.mark.parametrize("bad", [3.0, np.ones(3), "text", None])
def test_only_arrays_cross(bad):
    for cross in (to_torch, to_jax):
        if bad is None:
            assert cross(bad) is None  # an empty pytree
        else:
            with pytest.raises(InvalidInputError):
                cross(bad)


def test_arrays_that_torch_cannot_hold_are_refused():
    deleted = jnp.ones(3) + 0
    deleted.delete()
    for array in (jax.random.key(0), deleted):
        with pytest.raises(InvalidInputError):
            to_torch(array)


def test_traced_arrays_are_sent_to_torch_call():
    with pytest.raises(InvalidInputError, match="torch_call"):
        jax.jit(to_torch)(jnp.ones(3))


# torch_call


def add(x, y):
    return x + y


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("jit", [False, True])
def test_call(dtype, jit):
    x, y = jnp.arange(12).reshape(3, 4).astype(dtype), jnp.ones((3, 4), dtype)
    call = torch_call(add, shape_of(x))
    out = (jax.jit(call) if jit else call)(x, y)
    assert isinstance(out, jax.Array)
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x + y))


def test_arguments_are_not_copied():
    seen = []

    def spy(x):
        seen.append((x.data_ptr(), torch.is_grad_enabled(), x.device))
        return x.sum()[None]

    x = jnp.arange(5000.0)
    out = jax.jit(torch_call(spy, jax.ShapeDtypeStruct((1,), x.dtype)))(x)
    assert float(out[0]) == float(x.sum())
    assert seen == [(pointer(x), False, DEVICE)]


@pytest.mark.parametrize("kind", [tuple, list])
def test_several_results(kind):
    x = jnp.arange(6.0).reshape(2, 3)
    outs = [shape_of(x), jax.ShapeDtypeStruct((3, 2), jnp.float32)]
    got = jax.jit(torch_call(lambda x: kind([2 * x, x.mT]), kind(outs)))(x)
    assert len(got) == 2
    np.testing.assert_array_equal(got[0], 2 * x)
    np.testing.assert_array_equal(got[1], x.T)  # a strided result


def test_one_result_in_a_sequence_stays_a_sequence():
    x = jnp.ones(3)
    (out,) = torch_call(lambda x: (x,), [shape_of(x)])(x)
    assert out.tolist() == [1, 1, 1]


def test_a_returned_argument_is_copied():
    """Without an alias the result has memory of its own."""
    x = jnp.arange(3.0)
    out = jax.jit(torch_call(lambda x: x, shape_of(x)))(x)
    assert pointer(out) != pointer(x)
    assert out.tolist() == x.tolist()


def test_no_arguments_and_no_elements():
    assert torch_call(lambda: torch.ones(2, device=DEVICE), jax.ShapeDtypeStruct((2,), "float32"))(
    ).tolist() == [1, 1]  # fmt: skip
    empty = jnp.zeros((0, 3))
    assert jax.jit(torch_call(lambda x: x * 2, shape_of(empty)))(empty).shape == (0, 3)


def test_in_scan():
    step = torch_call(lambda x, y: x * 2 + y, jax.ShapeDtypeStruct((3,), jnp.float32))

    def body(carry, y):
        carry = step(carry, y)
        return carry, carry.sum()

    ys = jnp.arange(15.0).reshape(5, 3)
    total, sums = jax.jit(lambda x: jax.lax.scan(body, x, ys))(jnp.ones(3))
    want, want_sums = jnp.ones(3), []
    for y in ys:
        want = want * 2 + y
        want_sums.append(float(want.sum()))
    assert total.tolist() == want.tolist()
    assert sums.tolist() == want_sums


def test_in_vmap():
    x = jnp.arange(12.0).reshape(4, 3)
    call = torch_call(lambda x: x.cumsum(0), jax.ShapeDtypeStruct((3,), jnp.float32))
    np.testing.assert_array_equal(jax.vmap(call)(x), jnp.cumsum(x, axis=1))


def test_between_other_computations():
    """Operands that XLA has just computed, and results that it uses at once."""
    call = torch_call(lambda x: x.sort(0).values, jax.ShapeDtypeStruct((512,), jnp.float32))
    x = jax.random.normal(jax.random.key(0), (512,))
    got = jax.jit(lambda x: call(jnp.sin(x) * 3)[::-1] + 1)(x)
    np.testing.assert_allclose(got, jnp.sort(jnp.sin(x) * 3)[::-1] + 1, rtol=1e-6)


def test_gradients_are_refused():
    call = torch_call(lambda x: x * 2, jax.ShapeDtypeStruct((3,), jnp.float32))
    with pytest.raises(ValueError, match="differentiated"):
        jax.grad(lambda x: call(x).sum())(jnp.ones(3))


TRIED = """
def attempt():
    try:
        raise ImportError
    except ImportError as error:
        kept = [error]  # the error's traceback leads to this frame, which holds the error

attempt()
"""


def test_the_function_may_import(tmp_path, monkeypatch):
    """What an import leaves in cycles, frames of this call among it, is none of tvm-ffi's leaks."""
    (tmp_path / "imported_in_a_call.py").write_text(TRIED)
    monkeypatch.syspath_prepend(tmp_path)

    def twice(x):
        importlib.import_module("imported_in_a_call")
        return x * 2

    try:
        call = jax.jit(torch_call(twice, jax.ShapeDtypeStruct((3,), jnp.float32)))
        assert call(jnp.ones(3)).tolist() == [2, 2, 2]
    finally:
        sys.modules.pop("imported_in_a_call", None)


def scatter(cache, rows, values):
    cache.index_copy_(0, rows.long(), values)
    return cache


def scatter_silently(cache, rows, values):
    scatter(cache, rows, values)


@pytest.mark.parametrize("fn", [scatter, scatter_silently])
def test_aliases_update_in_place(fn):
    """The donated buffer is the result's: same pointer, seen by torch, no copy by anyone."""
    cache = jnp.zeros((1000, 8)) + 0
    before = pointer(cache)
    update = torch_call(fn, shape_of(cache), aliases={0: 0})
    step = jax.jit(update, donate_argnums=0)
    out = step(cache, jnp.array([3, 7]), jnp.ones((2, 8)))
    assert pointer(out) == before
    assert cache.is_deleted()
    assert out.sum(1)[jnp.array([2, 3, 7])].tolist() == [0, 8, 8]
    assert float(out.sum()) == 16


def test_aliases_without_donation_leave_the_argument_alone():
    cache = jnp.zeros((10, 8)) + 0
    update = jax.jit(torch_call(scatter, shape_of(cache), aliases={0: 0}))
    out = update(cache, jnp.array([3, 7]), jnp.ones((2, 8)))
    assert pointer(out) != pointer(cache)
    assert float(out.sum()) == 16
    assert float(cache.sum()) == 0


def test_aliases_beside_other_results():
    cache = jnp.zeros((10, 8)) + 0
    outs = [jax.ShapeDtypeStruct((), jnp.float32), shape_of(cache)]

    def update(values, cache):
        cache += values
        return cache.sum(), cache

    before = pointer(cache)
    step = jax.jit(torch_call(update, outs, aliases={1: 1}), donate_argnums=1)
    total, cache = step(jnp.ones((10, 8)), cache)
    assert pointer(cache) == before
    assert float(total) == float(cache.sum()) == 80


def test_torch_writes_the_cache_inside_jit():
    """The cache update of the torch layer, as a JAX function."""
    import pagedattn_torch

    cache = random_cache()
    new = rows(3, cache)
    slots = np.array([35, -1, 4], np.int32)
    want = reference_write(*as_numpy(cache), *(np.asarray(x) for x in new), slots)

    def write(key_cache, value_cache, key, value, slots):
        pagedattn_torch.write_kv_(KVCache(key_cache, value_cache), key, value, slots)

    planes = [shape_of(cache.key), shape_of(cache.value)]
    before = [pointer(cache.key), pointer(cache.value)]
    step = jax.jit(torch_call(write, planes, aliases={0: 0, 1: 1}), donate_argnums=(0, 1))
    planes = step(cache.key, cache.value, *new, jnp.asarray(slots))
    assert [pointer(plane) for plane in planes] == before
    np.testing.assert_array_equal(planes[0], want[0])
    np.testing.assert_array_equal(planes[1], want[1])


def boom(x):
    raise KeyError("a torch function lost its way")


@pytest.mark.parametrize("jit", [False, True])
def test_exceptions_surface(jit):
    """With their message; the next call works."""
    x = jnp.ones(3)
    call = torch_call(boom, shape_of(x))
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="a torch function lost its way"):
            jax.block_until_ready((jax.jit(call) if jit else call)(x))
    assert torch_call(add, shape_of(x))(x, x).tolist() == [2, 2, 2]


WRONG = {
    "shape": lambda x: x[:2],
    "dtype": lambda x: x.double(),
    "count": lambda x: (x, x),
    "nothing": lambda x: None,
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_results_are_named(name):
    x = jnp.ones(3)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"float32\[3\]"):
        jax.block_until_ready(torch_call(WRONG[name], shape_of(x))(x))


def test_many_calls_from_threads():
    """Each thread its own program and values; none is mixed up or lost."""
    out = jax.ShapeDtypeStruct((64,), jnp.float32)

    def work(i):
        call = jax.jit(torch_call(lambda x: x * i + 1, out))
        results = [call(jnp.full(64, float(n))) for n in range(40)]
        return [float(result[0]) for result in results]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = list(pool.map(work, range(16)))
    assert got == [[float(n * i + 1) for n in range(40)] for i in range(16)]


def test_one_program_from_threads():
    call = jax.jit(torch_call(add, jax.ShapeDtypeStruct((64,), jnp.float32)))
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        got = pool.map(lambda n: float(call(jnp.full(64, float(n)), jnp.ones(64))[5]), range(200))
        assert list(got) == [float(n + 1) for n in range(200)]


def test_the_cost_of_a_call_does_not_grow_with_its_operands():
    """An operand of 128 MiB costs what one of 4 KiB does; copying it would take milliseconds."""
    call = jax.jit(torch_call(lambda x: x[:1] * 2, jax.ShapeDtypeStruct((1,), jnp.float32)))
    small, large = (best_time(call, jnp.zeros(n)) for n in (2**10, 2**25))
    assert large < small + 1e-3


@pytest.mark.parametrize("fn", [lambda a, b: (b, a), lambda a, b: [b.flip(0), a]])
def test_results_that_lie_in_each_others_memory_do_not_overwrite_one_another(fn):
    struct = jax.ShapeDtypeStruct((4,), jnp.float32)
    swap = jax.jit(torch_call(fn, [struct] * 2, aliases={0: 0, 1: 1}), donate_argnums=(0, 1))
    first, second = swap(jnp.zeros(4), jnp.ones(4))
    assert first.tolist() == [1.0] * 4
    assert second.tolist() == [0.0] * 4


def test_a_view_of_the_own_result_is_no_result_in_place():
    struct = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    turn = jax.jit(torch_call(lambda a: a.mT, struct, aliases={0: 0}), donate_argnums=0)
    assert turn(jnp.arange(4.0).reshape(2, 2)).tolist() == [[0.0, 2.0], [1.0, 3.0]]


def test_what_is_no_tensor_is_named():
    with pytest.raises(jax.errors.JaxRuntimeError, match="got int"):
        jax.block_until_ready(
            torch_call(lambda x: 3, jax.ShapeDtypeStruct((1,), jnp.float32))(jnp.zeros(1))
        )
