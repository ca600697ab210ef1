"""How the tests call layers: a problem as fresh keys, a cache without them, and metadata."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
from cases import asked_of, calls
from pagedattn_interop import to_torch

from pagedattn import AttentionSpec, UnsupportedError
from pagedattn.testing import Problem, batch_of, reference_attention
from pagedattn_torch import (
    AttentionMetadata,
    AttentionType,
    IpexAttnBackendImpl,
    TorchSDPABackendImpl,
)
from pagedattn_torch.layers import biases, plans, slots, unwritten
from pagedattn_torch.layers.metadata import batches, derivation, engine_forms, lengths


class RefusingLayer(IpexAttnBackendImpl):
    """A refusal that names what the layer is to do ends the test, or the example."""

    def forward(self, *args, **options):
        try:
            out = super().forward(*args, **options)
        except UnsupportedError as error:
            if "cannot run this call" not in str(error):
                raise
            asked = asked_of(self.specs[AttentionType.DECODER])
            biased = getattr(args[4], "attn_bias", None) is not None
            calls.refuse(error, [*asked, *["bias"] * biased], "ipex")
        calls.ran += 1
        return out


LAYERS = {"sdpa": TorchSDPABackendImpl, "ipex": RefusingLayer}
layer_cls = TorchSDPABackendImpl  # the fixture `layers` sets it

TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def hide_values(monkeypatch) -> None:
    """As on a GPU: values of tensors are not known."""
    for module in (batches, biases, derivation, engine_forms, lengths, plans, slots, unwritten):
        monkeypatch.setattr(module, "known", lambda array: None)


class Step(NamedTuple):
    """The arguments of a forward."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    kv_cache: Any
    attn_metadata: Any


def tensor(array) -> torch.Tensor:
    """Memory of its own."""
    return to_torch(jnp.asarray(array), copy=True)


def new_layer(*args, **options):
    """A layer of the class that is tested."""
    return layer_cls(*args, **options)


def layer_of(problem: Problem, **options):
    """A layer that computes the problem's spec, but for its causality."""
    spec = problem.spec
    return new_layer(
        num_heads=problem.query.shape[1],
        head_size=problem.query.shape[2],
        num_kv_heads=problem.key_cache.shape[2],
        scale=spec.scale,
        alibi_slopes=spec.alibi_slopes,
        sliding_window=spec.sliding_window,
        logits_soft_cap=spec.logits_soft_cap,
        **options,
    )


def step_of(problem: Problem, **split) -> Step:
    """The new tokens' keys taken out of the cache, with NaN in their place."""
    meta = AttentionMetadata.from_batch(batch_of(problem), **split)
    kv_cache = torch.stack([tensor(problem.key_cache), tensor(problem.value_cache)])
    slots = meta.slot_mapping.long()
    flat = kv_cache.flatten(1, 2)
    key, value = (plane[slots.clamp(min=0)].clone() for plane in flat)
    flat[:, slots[slots >= 0]] = torch.nan
    return Step(tensor(problem.query), key, value, kv_cache, meta)


def reference(problem: Problem) -> np.ndarray:
    """The oracle's out."""
    arrays = problem.query, problem.key_cache, problem.value_cache
    lens = problem.block_tables, problem.seq_lens, problem.query_start_loc
    return reference_attention(*arrays, *lens, problem.spec)[0]


def dense(query, key, value, query_lens, key_lens, spec: AttentionSpec, **options) -> np.ndarray:
    """The oracle's out for packed keys: each sequence's keys are one block."""
    width = max(max(key_lens, default=0), 1)
    planes = []
    for rows in (key, value):
        rows = rows.detach().cpu().double().numpy()
        blocks = np.full((max(len(key_lens), 1), width, *rows.shape[1:]), np.nan)
        for block, stop, n in zip(blocks, np.cumsum(key_lens), key_lens, strict=False):
            block[:n] = rows[stop - n : stop]
        planes.append(blocks)
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    tables = [[s] for s in range(len(key_lens))]
    query = query.detach().cpu().double().numpy()
    return reference_attention(query, *planes, tables, key_lens, starts, spec, **options)[0]


def normal(seed: int, *shape: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_close(got: torch.Tensor, want: np.ndarray, atol: float, rtol: float = 0.0) -> None:
    got = got.detach().cpu().double().numpy().reshape(want.shape)
    np.testing.assert_allclose(got, want, atol=atol, rtol=rtol)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """To the bit, but for the bits of NaN."""
    torch.testing.assert_close(got, want, atol=0, rtol=0, equal_nan=True)


def spec_of(layer, kind: str) -> AttentionSpec:
    return layer.specs[AttentionType(kind)]
