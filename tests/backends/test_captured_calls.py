"""What a captured call needs is on the device before: nothing is copied there from the host.

A copy from the host is an error while a CUDA graph is captured, and XLA may capture the first call.
"""

from dataclasses import replace
from importlib import import_module

import jax
import jax.numpy as jnp
import pytest

torch = pytest.importorskip("torch")
from cases import SPECS, mixed
from tensors import tensors
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pagedattn import AttentionSpec
from pagedattn._dispatch.call import call_of
from pagedattn.testing import batch_of, cache_of
from pagedattn_torch.arrays import batch_on
from pagedattn_torch.backends.bias import slopes_on
from pagedattn_torch.backends.sdpa import kernels
from pagedattn_torch.cache import set_rows_

ALL = SPECS | {"two-sided window": AttentionSpec(causal=False, sliding_window=4)}


class NothingFromTheHost(TorchDispatchMode):
    """Refuses tensors made of Python's numbers, and tensors of the host beside those of a device.

    Torch shows it the former on the CPU alone, and the latter only where there is a device: "meta",
    which computes all but the values.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves((args, kwargs, out))
        devices = {leaf.device for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert func is not torch.ops.aten.lift_fresh.default, leaves
        assert len(devices) < 2, f"{func} of {leaves}"
        return out


def sdpa_starts(monkeypatch):
    """Torch's kernels of a GPU, which a CPU does not have, are computed plainly."""
    monkeypatch.setattr(kernels, "choose", lambda _: kernels._plain)


def triton_starts(monkeypatch):
    monkeypatch.setattr("pagedattn_torch.backends.triton._start", lambda *_: None)


def xformers_starts(monkeypatch):
    def attend(op, call, query, key, value, mask):
        return query[..., : value.shape[-1]], query[..., 0].float().movedim(1, -1)

    monkeypatch.setattr("pagedattn_torch.backends.xformers._attend", attend)


STARTS = {"sdpa": sdpa_starts, "triton": triton_starts, "xformers": xformers_starts}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("arrays", [(), ("bias",)])
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("backend", STARTS)
def test_nothing_is_copied_from_the_host(backend, name, arrays, device, monkeypatch):
    pytest.importorskip("torch" if backend == "sdpa" else backend)
    STARTS[backend](monkeypatch)
    problem = mixed(ALL[name], dtype=jnp.dtype("bfloat16"), arrays=arrays)
    given = jnp.asarray(problem.query), cache_of(problem), jax.tree.map(jnp.asarray, problem.arrays)
    query, cache, options = jax.tree.map(lambda x: x.to(device), tensors(given))
    batch = batch_on(batch_on(batch_of(problem), "cpu"), device)
    call = replace(call_of(query, cache, batch, problem.spec, True, **options), device="cuda")
    chosen = import_module(f"pagedattn_torch.backends.{backend}").BACKEND
    if not {*call.set_options} <= {*chosen.supports}:
        pytest.skip(f"{backend} refuses it")
    with NothingFromTheHost():
        chosen.run(call, query, cache, chosen.plan(call, batch), **options)


def test_writes_copy_nothing_from_the_host():
    arrays = jnp.zeros((8, 2, 4)), jnp.array([1, -1]), jnp.ones((2, 2, 4))
    array, ids, rows = (x.to("meta") for x in tensors(arrays))
    with NothingFromTheHost():
        set_rows_(array, ids, rows)


@pytest.mark.parametrize(
    "slopes", [(0.5,), (0.1, -2.5e-20, 3e37), tuple(0.7**i for i in range(200))]
)
def test_slopes_are_those_of_the_spec(slopes):
    got = slopes_on(slopes, torch.device("cpu"))
    assert got.dtype is torch.float32
    assert torch.equal(got, torch.tensor(slopes, dtype=torch.float32))
