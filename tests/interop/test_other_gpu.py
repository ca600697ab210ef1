"""Tensors on a GPU that is not torch's current one: every entry of torch, and every crossing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, mixed

import pagedattn
from pagedattn import KVCache, UnsupportedError
from pagedattn.testing import assert_attention_close, batch_of, cache_of

torch = pytest.importorskip("torch")
from pagedattn_interop import to_jax, to_torch, torch_call

import pagedattn_torch

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"
)


@pytest.fixture(autouse=True, params=["first is current", "last is current"])
def other(request):
    """A device, while another is torch's current one."""
    last = torch.cuda.device_count() - 1
    current, index = (0, last) if request.param == "first is current" else (last, 0)
    with torch.cuda.device(current):
        yield torch.device("cuda", index)
        # Which one is current now is not compared: JAX's programs change it, too.


def on(device, tree):
    """Torch's own memory there, of the values of JAX arrays."""
    return jax.tree.map(lambda leaf: torch.from_dlpack(leaf).to(device, copy=True), tree)


def arguments(problem):
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem)


def numbers(tensor):
    return tensor.float().cpu().numpy()


@pytest.mark.parametrize("copy", [False, True])
def test_there_and_back(other, copy):
    tensor = torch.arange(64.0, device=other)
    array = to_jax(tensor, copy=copy)
    assert (array.unsafe_buffer_pointer() == tensor.data_ptr()) is not copy
    assert next(iter(array.devices())).local_hardware_id == other.index
    back = to_torch(array * 2, copy=copy)
    assert back.device == other
    np.testing.assert_array_equal(numbers(back), 2 * np.arange(64.0))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["plain", "sliding_window", "alibi_slopes"])
@pytest.mark.parametrize("backend", ["triton", "xformers", "sdpa"])
def test_attention(other, backend, name, dtype):
    problem = mixed(SPECS[name], dtype=jnp.dtype(dtype), head_dim=64, block_size=16)
    call = (*on(other, arguments(problem)), problem.spec)
    why = pagedattn_torch.explain(*call, return_lse=True)[backend]
    if why:
        with pytest.raises((UnsupportedError, ImportError)):
            pagedattn_torch.paged_attention(*call, backend=backend, return_lse=True)
        pytest.skip(why[0])
    out, lse = pagedattn_torch.paged_attention(*call, backend=backend, return_lse=True)
    assert out.device == lse.device == other
    assert_attention_close(numbers(out).astype(problem.query.dtype), numbers(lse), problem)


def test_writes_and_copies(other):
    cache = KVCache(*(torch.zeros(4, 2, 1, 8, device=other) for _ in range(2)))
    rows = torch.ones(2, 1, 8, device=other)
    pagedattn_torch.write_kv_(cache, rows, rows, torch.tensor([1, 4], device=other))
    pagedattn_torch.copy_blocks_(cache, torch.tensor([0]), torch.tensor([3]))
    want = np.zeros((8, 8))
    want[[1, 4, 7]] = 1
    np.testing.assert_array_equal(numbers(cache.key).reshape(8, 8), want)
    here = KVCache(*(torch.zeros(4, 2, 1, 8, device="cuda") for _ in range(2)))
    pagedattn_torch.swap_blocks_(cache, here, torch.tensor([2]), torch.tensor([1]))
    np.testing.assert_array_equal(numbers(here.value).reshape(8, 8)[2], 1)


def test_jax_functions_on_tensors_there(other):
    """Shared where they lie: JAX's results are on that device, too."""
    problem = mixed(dtype=jnp.dtype("bfloat16"), head_dim=64, block_size=16)
    query, cache, batch = on(other, arguments(problem))
    out, lse = pagedattn.paged_attention(query, cache, batch, return_lse=True)
    assert {d.local_hardware_id for d in out.devices()} == {other.index}
    assert_attention_close(np.asarray(out), np.asarray(lse), problem)


@pytest.mark.parametrize("capturable", [False, True])
def test_torch_call(other, capturable):
    device = jax.devices()[other.index]
    x = jax.device_put(jnp.arange(8.0), device)
    seen = []

    def fn(x):
        seen.append((torch.cuda.current_device(), x.device))
        return x + 1

    out = jax.jit(torch_call(fn, jax.ShapeDtypeStruct((8,), x.dtype), capturable=capturable))(x)
    np.testing.assert_array_equal(out, np.arange(1, 9))
    assert set(seen) == {(other.index, other)}
