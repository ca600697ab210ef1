"""Arrays of other frameworks at every public entry point: shared by pointer, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import as_numpy, good_call, random_cache, rows
from public_calls import CORE
from selection_calls import SELECTION

import pagedattn
from pagedattn import InvalidInputError, KVCache
from pagedattn._arrays.dlpack import takes_any_array
from pagedattn._dispatch import validate
from pagedattn.cache import validate as validate_cache
from pagedattn.cache import validate_writes

torch = pytest.importorskip("torch")
HALVES = (jnp.float32, jnp.bfloat16, jnp.float16)


class Foreign:
    """An array that nobody knows, with the protocol alone."""

    def __init__(self, tensor):
        self.tensor, self.dtype = tensor, str(tensor.dtype).removeprefix("torch.")
        self.shape, self.ndim = tuple(tensor.shape), tensor.ndim

    def __dlpack__(self, **kwargs):
        with torch.cuda.device_of(self.tensor):
            return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


def tensors_of(tree):
    """Torch's own memory with the values of JAX arrays, on their device."""
    return jax.tree.map(lambda leaf: torch.from_dlpack(leaf).clone(), tree)


def foreigners_of(tree):
    return jax.tree.map(Foreign, tensors_of(tree))


def wide(tree):
    """The tensors with integers of 64 bits, as torch makes them."""
    return jax.tree.map(lambda leaf: leaf.long() if not leaf.is_floating_point() else leaf, tree)


def pointer(leaf) -> int:
    if isinstance(leaf, jax.Array):
        return leaf.unsafe_buffer_pointer()
    leaf = getattr(leaf, "tensor", leaf)
    return leaf.data_ptr() if isinstance(leaf, torch.Tensor) else leaf.ctypes.data


def pointers(tree) -> list[int]:
    return [pointer(leaf) for leaf in jax.tree.leaves(tree)]


def ragged_arguments(dtype):
    starts = jnp.array([0, 1, 3], jnp.int32)
    x = jnp.arange(24.0).reshape(3, 1, 8).astype(dtype) / 24
    return x, x + 1, x - 1, starts, starts


def attention_arguments(dtype):
    query, cache, batch, _ = good_call()
    return (*jax.tree.map(lambda x: x.astype(dtype), (query, cache)), batch)


def ids(*values):
    return jnp.array(values, jnp.int32)


def cache_and_rows(dtype):
    cache = random_cache(dtype=np.dtype(dtype))
    return cache, *rows(2, cache)


def swapped(array):
    """The array in the byte order that is not the machine's."""
    array = np.asarray(array)
    return array.astype(array.dtype.newbyteorder())


LENS = {"max_query_len": 2, "max_key_len": 2}
# Entry point -> its arguments as JAX arrays, and what checks them once they are JAX's.
CALLS = {
    "paged_attention": (attention_arguments, {}, "attention"),
    "ragged_attention": (ragged_arguments, LENS, "ragged"),
    "explain": (attention_arguments, {}, "attention"),
    "write_kv": (lambda dtype: (*cache_and_rows(dtype), ids(3, 9)), {}, "write"),
    "copy_blocks": (lambda d: (cache_and_rows(d)[0], ids(0, 1), ids(1, 2)), {}, "block_copies"),
    "swap_blocks": (
        lambda d: (cache_and_rows(d)[0], cache_and_rows(d)[0], ids(0), ids(3)),
        {},
        "block_copies",
    ),
    "fill_blocks": (lambda dtype: (cache_and_rows(dtype)[0], ids(1, -1)), {}, "fill"),
}
KINDS = {"torch": tensors_of, "protocol": foreigners_of}
NUMPY = {"NumPy": np.asarray, "the other byte order": swapped}


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_shared_by_pointer(name, kind, dtype, monkeypatch):
    """What the checks see, and all that comes after them, is JAX's view of the memory given."""
    make, options, check = CALLS[name]
    arguments = make(dtype)
    given = KINDS[kind](arguments)
    before, seen = pointers(given), []
    checks = next(
        module for module in (validate, validate_cache, validate_writes) if hasattr(module, check)
    )
    original = getattr(checks, check)

    def spy(*arrays, **kwargs):
        seen.append([pointer(x) for x in jax.tree.leaves(arrays) if hasattr(x, "dtype")])
        assert not any(isinstance(x, torch.Tensor | Foreign) for x in jax.tree.leaves(arrays))
        return original(*arrays, **kwargs)

    monkeypatch.setattr(checks, check, spy)
    got = getattr(pagedattn, name)(*given, **options)
    assert set(before) <= set(seen[0])
    monkeypatch.undo()
    want = getattr(pagedattn, name)(*arguments, **options)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    tensors = jax.tree.map(lambda leaf: getattr(leaf, "tensor", leaf), given)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(_numbers, tensors), _all(arguments))


def _numbers(leaf):
    return np.asarray(leaf.float().cpu() if isinstance(leaf, torch.Tensor) else leaf, np.float32)


def _all(tree):
    return jax.tree.map(_numbers, tree)


@pytest.mark.parametrize("name", CALLS)
def test_integers_of_64_bits_in_host_memory(name):
    """Torch's default for tables and slots; nothing is lost, whatever JAX's own width."""
    make, options, _ = CALLS[name]
    with jax.default_device(jax.devices("cpu")[0]):
        arguments = make(jnp.float32)
        got = getattr(pagedattn, name)(*wide(tensors_of(arguments)), **options)
        want = getattr(pagedattn, name)(*arguments, **options)
        jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.usefixtures("on_cpu")  # a GPU would be done before anybody looks
def test_results_are_ready_when_foreign_memory_was_read():
    """Its owner may write to it now; of its own arrays JAX takes care itself."""

    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 20, lambda _, y: jnp.tanh(y @ x), x)

    def call(x):
        return slow(slow(x))  # the second starts when the first is done, which nobody waits for

    array = jnp.ones((500, 500)) / 500
    call(array).block_until_ready()
    assert not takes_any_array(call)(array).is_ready()
    assert takes_any_array(call)(torch.from_dlpack(array).clone()).is_ready()


def on_host(leaf):
    """Integers that are no plane of a cache as an engine's own, which it fills anew each step."""
    integers = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.integer)
    return np.array(leaf) if integers and leaf.ndim < 4 else leaf


GOOD_CALLS = {
    name: call
    for name, call in (CORE | SELECTION).items()
    if hasattr(pagedattn, name.split()[0])  # functions of JAX arrays, by their names
}


@pytest.mark.parametrize("name", GOOD_CALLS)
def test_results_hold_nothing_of_the_callers_integers(name):
    function, arguments = GOOD_CALLS[name]()
    given = jax.tree.map(on_host, arguments)
    results = [leaf for leaf in jax.tree.leaves(function(**given)) if hasattr(leaf, "dtype")]
    before = [*map(_numbers, results)]
    for leaf in jax.tree.leaves(given):
        if isinstance(leaf, np.ndarray):
            leaf[...] = 77
    for result, held in zip(results, before, strict=True):
        np.testing.assert_array_equal(_numbers(result), held)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def unaligned(x):
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


REFUSED = {
    "strides": (strided, "contiguous"),
    "float64": (lambda x: x.double(), "jax_enable_x64"),
    "gradient": (lambda x: x.requires_grad_(), "detach"),
    "negated lazily": (torch._neg_view, "resolve_neg"),
    "sparse": (lambda x: x.to_sparse(), "strided"),
    "complex half": (lambda x: x.to(torch.complex32), "unsupported"),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused_by_name_with_the_cure(case):
    cache, key, value, slots = CALLS["write_kv"][0](jnp.float32)
    spoil, cure = REFUSED[case]
    with pytest.raises(InvalidInputError, match=rf"(?s)value.*{cure}"):
        pagedattn.write_kv(cache, key, spoil(tensors_of(value)), slots)
    planes = tensors_of(cache)
    broken = KVCache(planes.key, spoil(planes.value))
    with pytest.raises(InvalidInputError, match=rf"(?s)cache\.value.*{cure}"):
        pagedattn.write_kv(broken, key, value, slots)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's alignment")
def test_unaligned_memory_is_refused_not_copied():
    cache, key, value, slots = CALLS["write_kv"][0](jnp.float32)
    with pytest.raises(InvalidInputError, match=r"key.*aligned"):
        pagedattn.write_kv(cache, unaligned(tensors_of(key)), value, slots)


def test_integers_that_are_no_plain_memory_are_refused_by_name():
    cache, key, value, slots = CALLS["write_kv"][0](jnp.float32)
    with pytest.raises(InvalidInputError, match="slot_mapping"):
        pagedattn.write_kv(cache, key, value, tensors_of(slots).to_sparse())


def test_strided_and_unaligned_integers_are_taken():
    """As views of a runner's own tables are; the core reads them through NumPy."""
    cache, key, value, _ = CALLS["write_kv"][0](jnp.float32)
    slots = torch.arange(12)[1:8:6]
    out = pagedattn.write_kv(cache, key, value, slots)
    np.testing.assert_array_equal(out.key.reshape(-1, 2, 8)[jnp.array([1, 7])], key)


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("inside", ["eager", "closed over by jit"])
@pytest.mark.parametrize("name", [name for name in CALLS if name != "explain"])
def test_numpy_means_the_same_numbers(name, inside, kind):
    make, options, _ = CALLS[name]
    arguments = make(jnp.float32)
    others = jax.tree.map(NUMPY[kind], arguments)
    fn = getattr(pagedattn, name)
    want = fn(*arguments, **options)
    call = fn if inside == "eager" else jax.jit(lambda *_, **__: fn(*others, **options))
    got = call(*others, **options) if inside == "eager" else call()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


@pytest.mark.parametrize("dtype", HALVES, ids=lambda d: d.__name__)
def test_a_torch_cache_stays_as_it_was(dtype):
    cache, key, value, slots = CALLS["write_kv"][0](dtype)
    given = tensors_of(cache)
    out = pagedattn.write_kv(given, key, value, slots)
    assert isinstance(out.key, jax.Array)
    assert given.key.is_contiguous()
    np.testing.assert_array_equal(_numbers(given.key), as_numpy(cache)[0].astype(np.float32))
