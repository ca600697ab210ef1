"""Layers made with `batch_invariant`: their backends are asked for it, and keep to it."""

import dataclasses

import numpy as np
import pytest
import torch
from rearranged import Layout, Piece, bits, rearranged, rows_of
from supporting import backends_with
from torch_layers import step_of

from pagedattn import AttentionSpec, InvalidInputError, UnsupportedError
from pagedattn._dispatch.registry import Framework
from pagedattn.testing import random_problem
from pagedattn_torch import IpexAttnBackendImpl, TorchSDPABackendImpl, XFormersImpl
from pagedattn_torch.backends import sdpa
from pagedattn_torch.layers import settings
from pagedattn_torch.layers.impl import AttentionImpl

SIZES = {"num_heads": 4, "head_size": 16, "num_kv_heads": 2}


@pytest.mark.parametrize("cls", [TorchSDPABackendImpl, XFormersImpl, IpexAttnBackendImpl])
def test_constructors_refuse_what_their_backend_does(cls):
    with pytest.raises(UnsupportedError, match=f"batch_invariant: {cls.backend} does not have it"):
        cls(**SIZES, batch_invariant=True)
    assert cls(**SIZES).batch_invariant is False


def test_it_is_a_flag():
    with pytest.raises(InvalidInputError, match="batch_invariant"):
        TorchSDPABackendImpl(**SIZES, batch_invariant="yes")


def test_layers_with_and_without_it_share_no_step(monkeypatch):
    asked = []

    def run(call, *arrays, **options):
        asked.append(call.batch_invariant)
        return sdpa.BACKEND.run(call, *arrays, **options)

    supports = sdpa.BACKEND.supports | {"batch_invariant"}
    spy = dataclasses.replace(sdpa.BACKEND, run=run, supports=supports)
    monkeypatch.setattr(settings, "record", lambda *_: spy)
    monkeypatch.setattr(TorchSDPABackendImpl, "backend_of", lambda *_: spy)
    step = step_of(random_problem([3, 1], [3, 9], AttentionSpec()))
    for flag in (True, False, True):
        TorchSDPABackendImpl(**SIZES, batch_invariant=flag).forward(*step)
    half = len(asked) // 3  # a step of prompts and others has two parts
    assert asked == [True] * half + [False] * half + [True] * half


CONTEXTS = {
    "chunk": [Piece(0, 7, 20)],
    "decode": [Piece(0, 19, 20)],
    "prompt beside a chunk": [Piece(0, 0, 20), Piece(1, 4, 11)],
    "drafts": [Piece(1, 8, 11), Piece(0, 17, 20)],
}
TORCH = [
    param.values[1]
    for param in backends_with("batch_invariant")
    if param.values[0] is Framework.TORCH
]


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("backend", TORCH)
def test_prompts_chunks_and_decodes_have_the_same_bits(backend, name, dtype):
    class Layer(AttentionImpl):
        pass

    Layer.backend = backend
    layer = Layer(**SIZES, batch_invariant=True)
    prompts = random_problem([20, 11], [20, 11], AttentionSpec(), block_size=8, dtype=dtype)
    whole = layer.forward(*step_of(prompts))
    pieces = CONTEXTS[name]
    changed = rearranged(prompts, pieces, Layout(5, 2, 3, 0, 0, 0, np.nan, 1))
    got = layer.forward(*step_of(changed))
    want = torch.cat([whole[rows_of(prompts, piece)] for piece in pieces])
    np.testing.assert_array_equal(bits(got.numpy(force=True)), bits(want.numpy(force=True)))
