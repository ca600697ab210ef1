"""Good calls with every option, and of what crosses frameworks: more for the fuzzer to start from.

Those of `public_calls` leave sinks, biases, scales and prepared steps out.
"""

import contextlib
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pagedattn_interop as pi
import public_calls
import torch
from cases import random_cache, rows
from public_calls import (
    IMPL,
    METADATA,
    SHAPE,
    SIZES,
    cascade,
    fixed,
    i32,
    layer_cache,
    ragged_arguments,
    shared,
    state,
    tensors,
)
from selection_calls import SELECTION
from tree_calls import TREES

import pagedattn as pa
import pagedattn_torch as pt
from pagedattn.backends.xla import BACKEND as XLA


def sinks():
    return jnp.zeros(shared()["query"].shape[1])


def bias():
    (num_tokens, num_heads, _), batch = shared()["query"].shape, shared()["batch"]
    return jnp.zeros((num_tokens, num_heads, batch.block_size * batch.max_blocks))


def quantised(num_blocks=9):
    """A cache of int8 with a scale for each of two KV heads."""
    scale = jnp.array([0.1, 0.2])
    return pa.init_kv_cache(num_blocks, 4, 2, 8, "int8", key_scale=scale, value_scale=scale)


def optional():
    flags = {"return_lse": True, "batch_invariant": False}
    return {**shared(), **flags, "sinks": sinks(), "bias": bias()}


def attend(backend):
    return lambda: (pa.paged_attention, {**optional(), "backend": backend})


def attend_to_quantised():
    given = shared()
    shape, batch = given["query"].shape, given["batch"]
    blocks = int(batch.block_tables.max()) + 1
    sizes, scales = (blocks, batch.block_size, 2, shape[2]), {"key_scale": 0.1, "value_scale": 1}
    cache = pa.init_kv_cache(*sizes, "int8", **scales)
    return pa.paged_attention, {**given, "cache": cache, "backend": "xla"}


def write_quantised():
    key, value = rows(2, random_cache())
    arguments = {"cache": quantised(), "key": key, "value": value}
    return pa.write_kv, {**arguments, "slot_mapping": i32(3, 5)}


def blocks_between(swap, **caches):
    return lambda: (swap, {**{n: make() for n, make in caches.items()}, **ids()})


def ids():
    return {"src": i32(0, 1), "dst": i32(1, 2)}


BY = {"crossings": pa.Crossings()}
OPTIONS = {
    "init_kv_cache with per-token scales": fixed(
        pa.init_kv_cache,
        num_blocks=3,
        block_size=4,
        num_kv_heads=2,
        head_dim=8,
        dtype="int4",
        scales="token",
    ),
    "init_latent_cache with per-token scales": fixed(
        pa.init_latent_cache,
        num_blocks=3,
        block_size=4,
        head_dim=8,
        value_dim=4,
        dtype="int8",
        scales="token",
    ),
    "init_kv_cache with scales": fixed(
        pa.init_kv_cache,
        **SIZES,
        num_kv_heads=2,
        head_dim=4,
        dtype="int8",
        key_scale=0.5,
        value_scale=jnp.array([0.5, 1.0]),
        value_dim=3,
    ),
    "init_latent_cache with a scale": fixed(
        pa.init_latent_cache,
        **SIZES,
        head_dim=4,
        value_dim=3,
        dtype="float8_e4m3fn",
        num_kv_heads=1,
        key_scale=jnp.array([0.5]),
    ),
    "write_kv of eight bits": write_quantised,
    "copy_blocks of eight bits": blocks_between(pa.copy_blocks, cache=quantised),
    "swap_blocks of eight bits": blocks_between(
        pa.swap_blocks, src_cache=quantised, dst_cache=lambda: quantised(5)
    ),
    "fill_blocks of eight bits": lambda: (
        pa.fill_blocks,
        {"cache": quantised(), "blocks": i32(0, 1), "value": 3},
    ),
    "paged_attention to eight bits": attend_to_quantised,
    "paged_attention with options": attend("xla"),
    "paged_attention by sdpa with options": attend("sdpa"),
    "paged_attention by any with options": attend(None),
    "paged_attention by a Backend": attend(XLA),
    "paged_attention by Crossings": attend(pa.Crossings()),
    "explain with options": lambda: (pa.explain, {**optional(), **BY}),
    "select_backend": lambda: (pa.select_backend, {**optional(), **BY}),
    "ragged_attention with a bias": lambda: (
        pa.ragged_attention,
        {**ragged_arguments(), "bias": jnp.zeros((5, 1, 4))},
    ),
    "cascade_attention with sinks": lambda: (
        pa.cascade_attention,
        {**cascade(), "sinks": sinks()},
    ),
}


def torch_optional() -> dict[str, Any]:
    arguments = optional()
    names = ("query", "cache", "sinks", "bias")
    return arguments | {name: tensors(arguments[name]) for name in names}


def torch_attend(backend):
    return lambda: (pt.paged_attention, {**torch_optional(), "backend": backend})


def torch_ragged():
    arguments = ragged_arguments() | {"backend": "sdpa", "bias": jnp.zeros((5, 1, 4))}
    names = ("query", "key", "value", "query_start_loc", "key_start_loc", "sinks", "bias")
    return pt.ragged_attention, arguments | {name: tensors(arguments[name]) for name in names}


def attend_in_step():
    given = torch_optional()
    step = pt.prepare(**given, backend="sdpa")
    return step.attend, {name: given[name] for name in ("query", "cache", "sinks", "bias")}


def torch_write_quantised():
    arguments = write_quantised()[1]
    arguments = {n: tensors(arguments[n]) for n in ("cache", "key", "value")}
    return pt.write_kv_, {**arguments, "slot_mapping": torch.tensor([3, 5])}


def torch_merge():
    return pa.merge_states, tensors(state())


STEPS = {
    "prepare": lambda: (pt.prepare, {**torch_optional(), "backend": "sdpa"}),
    "prepare for any": lambda: (pt.prepare, {**torch_optional(), "backend": None}),
    "Step.attend": attend_in_step,
    "torch paged_attention with options": torch_attend("sdpa"),
    "torch paged_attention by any with options": torch_attend(None),
    "torch ragged_attention with a bias": torch_ragged,
    "torch explain with options": lambda: (pt.explain, {**torch_optional(), **BY}),
    "torch select_backend": lambda: (pt.select_backend, {**torch_optional(), **BY}),
    "write_kv_ of eight bits": torch_write_quantised,
    "init_kv_cache of tensors": fixed(
        pt.init_kv_cache,
        **SIZES,
        num_kv_heads=2,
        head_dim=4,
        dtype=torch.int8,
        device="cpu",
        scales="head",
        key_scale=0.5,
        value_scale=0.5,
        value_dim=3,
    ),
    "init_latent_cache of tensors": fixed(
        pt.init_latent_cache,
        **SIZES,
        num_kv_heads=1,
        head_dim=4,
        value_dim=3,
        dtype=torch.int8,
        device="cpu",
        scales="head",
        key_scale=0.5,
    ),
    "copy_blocks_ of eight bits": lambda: (
        pt.copy_blocks_,
        {"cache": tensors(quantised()), **ids()},
    ),
    "swap_blocks_ of eight bits": lambda: (
        pt.swap_blocks_,
        {"src_cache": tensors(quantised()), "dst_cache": tensors(quantised(5)), **ids()},
    ),
    "merge_states of tensors": torch_merge,
}


def called(fn, out, x, aliases, capturable, takes_out):
    options = {"aliases": aliases, "capturable": capturable, "takes_out": takes_out}
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # as promised where `fn` itself raises
        pi.torch_call(fn, out, **options)(x)


CROSSING = {
    "to_torch": lambda: (pi.to_torch, {"x": jnp.arange(3.0), "copy": False}),
    "to_torch of a tree": lambda: (pi.to_torch, {"x": [jnp.ones(2), i32(1)], "copy": True}),
    "to_jax": lambda: (pi.to_jax, {"x": torch.arange(3.0), "copy": False}),
    "to_jax of a tree": lambda: (
        pi.to_jax,
        {"x": {"a": torch.ones(2), "b": torch.arange(3)}, "copy": True},
    ),
    "torch_call": fixed(
        called,
        fn=torch.clone,
        out=jax.ShapeDtypeStruct((3,), jnp.float32),
        x=jnp.arange(3.0),
        aliases=None,
        capturable=False,
        takes_out=False,
    ),
}


def runner():
    return SimpleNamespace(
        device="cpu",
        graph_block_tables=torch.zeros(8, 4, dtype=torch.int32),
        max_seq_len_to_capture=64,
        attn_backend=pt.TorchSDPABackend,
        get_max_block_per_batch=lambda: 4,
    )


def captured(max_batch_size, batch_size, is_encoder_decoder_model):
    state = pt.AttentionState(runner())
    with state.graph_capture(max_batch_size):
        return state.graph_capture_get_metadata_for_batch(batch_size, is_encoder_decoder_model)


def put_into_buffers():
    """A step of two decodes for a graph of two."""
    state, meta = pt.AttentionState(runner()), captured(4, 2, True)
    buffers = state.get_graph_input_buffers(captured(4, 2, True), True)
    arguments = {"input_buffers": buffers, "attn_metadata": meta, "is_encoder_decoder_model": True}
    return state.prepare_graph_input_buffers, arguments


REST_OF_METADATA = {
    "seq_start_loc": torch.tensor([0, 3, 8]),
    "use_cuda_graph": False,
    "encoder_query_start_loc": torch.tensor([0, 2, 5]),
    "encoder_seq_start_loc": torch.tensor([0, 2, 5]),
    "attn_bias": None,
    "encoder_attn_bias": None,
    "cross_attn_bias": None,
    "multi_modal_placeholder_index_maps": None,
    "enable_kv_scales_calculation": False,
}


def forward_into_output():
    meta = pt.TorchSDPAMetadata(**METADATA)
    arguments = {
        **{name: torch.ones(4, 16) for name in ("query", "key", "value")},
        "kv_cache": layer_cache(),
        "attn_metadata": meta,
        "output": torch.zeros(4, 16),
    }
    return pt.TorchSDPABackendImpl(num_heads=2, head_size=8).forward, arguments


def forward_quantised():
    """A cache in eight bits, with a scale for keys and one for values."""
    impl = pt.TorchSDPABackendImpl(num_heads=2, head_size=8, kv_cache_dtype="int8")
    arguments = {
        **{name: torch.ones(4, 16) for name in ("query", "key", "value")},
        "kv_cache": torch.zeros(2, 6, 4, 2, 8, dtype=torch.int8),
        "attn_metadata": pt.TorchSDPAMetadata(**METADATA),
        "k_scale": 0.1,
        "v_scale": 0.2,
    }
    return impl.forward, arguments


LAYERS = {
    "all of Metadata": fixed(pt.TorchSDPAMetadata, **METADATA, **REST_OF_METADATA),
    "XFormersMetadata": fixed(pt.XFormersMetadata, **METADATA, **REST_OF_METADATA),
    "IpexAttnMetadata": fixed(pt.IpexAttnMetadata, **METADATA, **REST_OF_METADATA),
    "forward into an output": forward_into_output,
    "forward of eight bits": forward_quantised,
    "XFormersImpl": fixed(pt.XFormersImpl, **IMPL),
    "IpexAttnBackendImpl": fixed(pt.IpexAttnBackendImpl, **IMPL),
    "XFormersBackend.get_kv_cache_shape": fixed(pt.XFormersBackend.get_kv_cache_shape, **SHAPE),
    "IpexAttnBackend.get_kv_cache_shape": fixed(pt.IpexAttnBackend.get_kv_cache_shape, **SHAPE),
    "AttentionState": fixed(
        captured, max_batch_size=4, batch_size=2, is_encoder_decoder_model=True
    ),
    "AttentionState.prepare_graph_input_buffers": put_into_buffers,
}


FAMILIES = {
    "CORE": public_calls.CORE,
    "TORCH": public_calls.TORCH,
    "CLASSES": public_calls.CLASSES,
    "OPTIONS": OPTIONS,
    "SELECTION": SELECTION,
    "TREES": TREES,
    "STEPS": STEPS,
    "CROSSING": CROSSING,
    "LAYERS": LAYERS,
}
