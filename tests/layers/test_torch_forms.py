"""Every class by every route on every layout of its inputs, held to the oracle.

Off CUDA the kernels of xFormers, and those of Intel's extension for an XPU, are stood in for.
"""

import functools

import numpy as np
import pytest
import torch
from layer_routes import ROUTES, Route, route
from torch_layers import assert_close, assert_same
from xpu_rules import stand_in_for_xpu

from pagedattn import InvalidInputError, UnsupportedError
from pagedattn._dispatch import registry
from pagedattn_torch import IpexAttnBackendImpl, TorchSDPABackendImpl, XFormersImpl

ON_GPU = torch.cuda.is_available()


@pytest.fixture(params=["sdpa", "xformers", "ipex on an XPU"])
def cls(request, monkeypatch):
    registry.tried.cache_clear()
    yield class_of(request, monkeypatch)
    registry.tried.cache_clear()


def class_of(request, monkeypatch):
    if request.param == "sdpa":
        return TorchSDPABackendImpl
    if request.param == "ipex on an XPU":
        return on_xpu(monkeypatch)
    pytest.importorskip("xformers")
    if not ON_GPU:
        from test_xformers import kernels, stand_in

        monkeypatch.setattr(kernels, "why_unusable", list)
        monkeypatch.setattr(kernels, "_attend", functools.partial(rounded, stand_in))
        anywhere = registry.BUILT_IN["xformers"]._replace(devices=())
        monkeypatch.setitem(registry.BUILT_IN, "xformers", anywhere)
    return XFormersImpl


def on_xpu(monkeypatch):
    if ON_GPU:
        pytest.skip("the stand-in for an XPU is on the CPU")
    stand_in_for_xpu(monkeypatch)
    return IpexAttnBackendImpl


def step_for(cls, name) -> Route:
    """A step of the class; on an XPU pages of 64 tokens, and 0 in place of NaN in them."""
    if cls is not IpexAttnBackendImpl:
        return on_device(route(name, cls))
    step = route(name, cls, block_size=64)
    clean = None if step.kv_cache is None else step.kv_cache.nan_to_num()
    return step._replace(kv_cache=clean)


def rounded(kernel, op, call, query, *args):
    """Results in the dtype of queries, as kernels give them."""
    out, lse = kernel(op, call, query, *args)
    return out.to(query.dtype), lse


def fused(*rows):
    """Slices of one tensor, as a model projects to queries, keys and values at once."""
    widths = [x.shape[1] for x in rows]
    return torch.cat(rows, 1).split(widths, 1)


def fused_flat(query, key, value):
    flat = [x.flatten(1) for x in (query, key, value)]
    return fused(*flat) if len(query) == len(key) else (flat[0], *fused(*flat[1:]))


def strided(x):
    """Rows with gaps between them."""
    return torch.cat([x, x], 1)[:, : x.shape[1]]


LAYOUTS = {
    "3-D": lambda *rows: rows,
    "2-D": lambda *rows: tuple(x.flatten(1) for x in rows),
    "batch of one": lambda *rows: tuple(x.flatten(1)[None] for x in rows),
    "batch of one, heads": lambda *rows: tuple(x[None] for x in rows),
    "fused": fused_flat,
    "fused batch of one": lambda *rows: tuple(x[None] for x in fused_flat(*rows)),
    "strided": lambda *rows: tuple(strided(x) for x in rows),
    "heads first": lambda *rows: tuple(
        x.transpose(0, 1).contiguous().transpose(0, 1) for x in rows
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ROUTES)
def test_every_route_takes_every_layout(cls, name, layout):
    step = step_for(cls, name)
    rows = LAYOUTS[layout](*step.rows)
    out = step.layer.forward(*rows, step.kv_cache, step.meta, attn_type=step.kind)
    assert (out.shape, out.dtype) == (rows[0].shape, rows[0].dtype)
    assert_close(out, step.want, atol=4e-3, rtol=4e-3)


def on_device(step: Route) -> Route:
    if not ON_GPU:
        return step
    names = {name: x for name, x in step.meta.asdict_zerocopy().items() if torch.is_tensor(x)}
    moved = {name: x.cuda() for name, x in names.items()}
    meta = type(step.meta)(**step.meta.asdict_zerocopy() | moved)
    kv_cache = None if step.kv_cache is None else step.kv_cache.cuda()
    rows = tuple(x.cuda() for x in step.rows)
    return step._replace(rows=rows, kv_cache=kv_cache, meta=meta)


JUNK = {
    "nothing": None,
    "text": "x",
    "a fraction": 2.5,
    "an object": object(),
    "a list": [1, 2],
    "no tokens": torch.zeros(0, 64, dtype=torch.float16),
    "one axis": torch.zeros(64, dtype=torch.float16),
    "another dtype": torch.zeros(24, 64),
    "complex": torch.zeros(24, 64, dtype=torch.complex64),
    "another device": torch.zeros(24, 64, dtype=torch.float16, device="meta"),
    "NumPy": np.zeros((24, 64), np.float16),
}
ARGUMENTS = ("query", "key", "value", "kv_cache", "attn_metadata", "attn_type", "output", "k_scale")


@pytest.mark.parametrize("junk", JUNK)
@pytest.mark.parametrize("argument", ARGUMENTS)
@pytest.mark.parametrize("name", ["chunk", "decode", "prompts without tables", "cross"])
def test_a_call_that_fails_leaves_the_cache(cls, name, argument, junk):
    """Whatever is wrong is an error of ours, and found before anything is written."""
    step = step_for(cls, name)
    names = ("query", "key", "value", "kv_cache", "attn_metadata", "attn_type")
    call = dict(zip(names, (*step.rows, step.kv_cache, step.meta, step.kind), strict=True))
    before = step.kv_cache.clone()
    try:
        step.layer.forward(**call | {argument: JUNK[junk]})
    except (InvalidInputError, UnsupportedError):
        assert_same(step.kv_cache, before)
