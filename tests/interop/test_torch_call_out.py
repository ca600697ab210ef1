"""torch_call with takes_out: torch writes its results into XLA's own buffers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import good_call
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_interop import to_torch, torch_call
from pagedattn_interop.backends import bridged
from quickest import best_time

from pagedattn import paged_attention
from pagedattn_torch.backends import sdpa

DEVICE = to_torch(jnp.zeros(1)).device
ROW = jax.ShapeDtypeStruct((4,), jnp.float32)
BINARY = {"add": torch.add, "maximum": torch.maximum, "atan2": torch.atan2}


def pointer(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


def writing(fn, out=ROW, **options):
    return torch_call(fn, out, takes_out=True, **options)


def both(x, *, out):
    """Two results by their `out`."""
    torch.mul(x, 2, out=out[0])
    torch.neg(x, out=out[1])


@given(
    st.sampled_from(sorted(BINARY)),
    st.lists(st.floats(-9, 9, width=32), min_size=4, max_size=4),
    st.booleans(),
)
def test_equal_to_the_form_that_returns(name, numbers, jit):
    x, y = jnp.array(numbers), jnp.arange(4.0)
    fn = BINARY[name]
    calls = writing(fn), torch_call(fn, ROW)
    got, want = ((jax.jit(call) if jit else call)(x, y) for call in calls)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("jit", [False, True])
def test_the_tensor_is_the_results_memory(jit):
    seen = []

    def spy(x, *, out):
        seen.append((out.data_ptr(), tuple(out.shape), out.dtype, out.device))
        out.copy_(x)

    x = jnp.arange(4.0)
    result = (jax.jit(writing(spy)) if jit else writing(spy))(x)
    assert seen == [(pointer(result), (4,), torch.float32, DEVICE)]
    assert pointer(result) != pointer(x)
    assert result.tolist() == x.tolist()


def test_several_results_are_a_tuple():
    x = jnp.arange(4.0)
    doubled, negated = jax.jit(writing(both, [ROW, ROW]))(x)
    assert doubled.tolist() == [0, 2, 4, 6]
    assert negated.tolist() == [0, -1, -2, -3]
    values, places = jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)

    def top(x, *, out):
        assert isinstance(out, tuple)
        values, places = x.topk(2)
        out[0].copy_(values)
        return out[0], places.int()  # written, and returned: the second is copied

    values, places = jax.jit(writing(top, (values, places)))(x)
    assert (values.tolist(), places.tolist()) == ([3, 2], [3, 2])


def test_one_result_in_a_sequence_is_a_tuple_too():
    (doubled,) = writing(lambda x, *, out: torch.mul(x, 2, out=out[0]), [ROW])(jnp.ones(4))
    assert doubled.tolist() == [2] * 4


def test_what_is_returned_from_elsewhere_is_copied():
    result = jax.jit(writing(lambda x, *, out: x + 1))(jnp.zeros(4))
    assert result.tolist() == [1] * 4


def test_a_view_of_out_is_copied_as_it_was():
    square = jax.ShapeDtypeStruct((2, 2), jnp.float32)
    turn = writing(lambda x, *, out: out.copy_(x).mT, square)
    assert jax.jit(turn)(jnp.arange(4.0).reshape(2, 2)).tolist() == [[0, 2], [1, 3]]


NEGATED = {
    "all": lambda x: torch._neg_view(x),
    "twice": lambda x: torch._neg_view(torch._neg_view(x)),
    "from another view": lambda x: torch._neg_view(x.view(2, 2)).view(4),
    "behind a copy": lambda x: torch._neg_view(x.clone()),
    "backwards": lambda x: torch._neg_view(x).flip(0),
}


@pytest.mark.parametrize("view", NEGATED)
@pytest.mark.parametrize("jit", [False, True])
def test_lazy_negations_keep_their_sign(view, jit):
    """Torch leaves the sign to whoever reads: memory that is XLA's already has to get it."""
    numbers, negate = jnp.arange(1.0, 5.0), NEGATED[view]
    want = negate(torch.arange(1.0, 5.0)).tolist()
    beside = [ROW, ROW]
    calls = {
        "aliased": torch_call(negate, ROW, aliases={0: 0}),
        "out": writing(lambda x, *, out: negate(out.copy_(x))),
        "returned": torch_call(negate, ROW),
        "several": torch_call(lambda x, y: (negate(x), negate(y)), beside, aliases={0: 0, 1: 1}),
        "swapped": torch_call(lambda x, y: (negate(y), negate(x)), beside, aliases={0: 0, 1: 1}),
    }
    for name, call in calls.items():
        arguments = (numbers, numbers) if name in ("several", "swapped") else (numbers,)
        for got in jax.tree.leaves((jax.jit(call) if jit else call)(*arguments)):
            assert got.tolist() == want, name


def test_in_scan_and_vmap():
    add = writing(torch.add)

    def body(carry, y):
        carry = add(carry, y)
        return carry, carry

    ys = jnp.arange(20.0).reshape(5, 4)
    total, sums = jax.jit(lambda x: jax.lax.scan(body, x, ys))(jnp.ones(4))
    np.testing.assert_array_equal(sums, 1 + jnp.cumsum(ys, 0))
    np.testing.assert_array_equal(total, sums[-1])
    np.testing.assert_array_equal(jax.vmap(add)(ys, ys), 2 * ys)


def test_beside_an_alias():
    """The donated argument is `out` too, and keeps its memory."""

    def update(cache, x, *, out):
        assert out[0].data_ptr() == cache.data_ptr()
        torch.add(cache, x, out=out[0])
        torch.sum(x, dim=0, keepdim=True, out=out[1])

    outs = [ROW, jax.ShapeDtypeStruct((1,), jnp.float32)]
    step = jax.jit(writing(update, outs, aliases={0: 0}), donate_argnums=0)
    cache = jnp.zeros(4) + 0
    before = pointer(cache)
    cache, total = step(cache, jnp.ones(4))
    assert pointer(cache) == before
    assert (cache.tolist(), total.tolist()) == ([1] * 4, [4])


def test_no_elements():
    empty = jax.ShapeDtypeStruct((0, 3), jnp.float32)
    assert jax.jit(writing(torch.neg, empty))(jnp.zeros((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("jit", [False, True])
def test_exceptions_surface(jit):
    def boom(x, *, out):
        out.copy_(x)
        raise KeyError("a torch function lost its way")

    call = jax.jit(writing(boom)) if jit else writing(boom)
    with pytest.raises(jax.errors.JaxRuntimeError, match="a torch function lost its way"):
        jax.block_until_ready(call(jnp.ones(4)))


def freed(x):
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def cut(x):
    x = x.clone()
    x.untyped_storage().resize_(8)
    return x


@pytest.mark.parametrize("fn", [freed, cut, torch._to_functional_tensor, lambda x: x.to("meta")])
@pytest.mark.parametrize("form", ["returned", "out", "one of two"])
def test_results_have_memory(fn, form):
    calls = {
        "returned": torch_call(fn, ROW),
        "out": writing(lambda x, *, out: fn(x)),
        "one of two": torch_call(lambda x: (x, fn(x)), [ROW, ROW]),
    }
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"a result of torch_call .*memory"):
        jax.block_until_ready(calls[form](jnp.ones(4)))


def forgets(x):
    return x


WRONG = {
    "another shape": (lambda x, *, out: out[:2], r"expects results torch.float32\[4\], got"),
    "another count": (lambda x, *, out: (out, out), "expects results"),
    "no tensor": (lambda x, *, out: 3, "got int"),
    "more than its memory": (lambda x, *, out: out.resize_(8), "resize"),
    "no keyword": (forgets, "unexpected keyword argument 'out'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_functions_are_named(name):
    fn, text = WRONG[name]
    with pytest.raises(jax.errors.JaxRuntimeError, match=text):
        jax.block_until_ready(writing(fn)(jnp.ones(4)))


def test_the_two_forms_of_one_function_are_two():
    """Functions are found by what they are; how they are called belongs to it."""

    def fn(x, out=None):
        return x + 1 if out is None else torch.sub(x, 1, out=out)

    x = jnp.zeros(4)
    run = jax.jit(lambda x: (torch_call(fn, ROW)(x), writing(fn)(x)))
    returned, written = run(x)
    assert (returned.tolist(), written.tolist()) == ([1] * 4, [-1] * 4)


def test_the_cost_of_a_call_does_not_grow_with_its_result():
    """Of 128 MiB one number is written. Copying the result would take milliseconds."""

    def write_one(x, *, out):
        out[:1].copy_(x)

    def cost(size):
        out = jax.ShapeDtypeStruct((size,), jnp.float32)
        return best_time(jax.jit(writing(write_one, out)), jnp.ones(1))

    assert cost(2**25) < cost(2**10) + 1e-3


@pytest.mark.skipif(DEVICE.type != "cpu", reason="elsewhere sdpa has a spare row")
@pytest.mark.parametrize("return_lse", [False, True])
def test_sdpa_writes_xlas_buffers(return_lse):
    seen = []

    def spy(*arguments, out):
        results = sdpa.run(*arguments, out=out)
        seen.append([part.data_ptr() for part in results if part is not None])
        return results

    backend = bridged(dataclasses.replace(sdpa.BACKEND, name="spy", run=spy))
    query, cache, batch, spec = good_call()
    options = {"backend": backend, "return_lse": return_lse}
    call = jax.jit(
        lambda query, cache, batch: paged_attention(query, cache, batch, spec, **options)
    )
    results = call(query, cache, batch)
    assert seen[-1] == [pointer(part) for part in jax.tree.leaves(results)]


@functools.cache
def chain(capturable):
    side = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    one = torch_call(torch.matmul, side, takes_out=True, capturable=capturable)
    return jax.jit(lambda x, y: functools.reduce(lambda x, _: one(x, y), range(8), x))


@pytest.mark.parametrize("capturable", [False, True])
def test_a_chain_of_products(capturable):
    """On a GPU enough of them that XLA captures them in a graph, where it may."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-9, 9, (256, 256)), jnp.float32)
    roll = jnp.roll(jnp.eye(256), 1, axis=1)
    for _ in range(4):
        np.testing.assert_array_equal(chain(capturable)(x, roll), np.roll(np.asarray(x), 8, axis=1))
