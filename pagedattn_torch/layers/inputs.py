"""Checks of the tensors that engines pass to a layer, which are brought to one form."""

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedattn import InvalidInputError, KVCache, UnsupportedError
from pagedattn._arrays.inspect import shown
from pagedattn._arrays.memory import require_alike, require_memory

from ..arrays import require_no_grad, require_tensors, require_writable, with_dense_rows
from ..cache import require_planes
from ..uncompiled import uncompiled
from .attention_type import AttentionType
from .metadata import AttentionMetadata, batches


def takes_layer(forward):
    """A decorator of `forward`: it may also be called as later engines do, with a layer in front.

    Their arguments are (layer, query, key, value, kv_cache, attn_metadata, output). Of the layer
    only the scales of a quantised cache are used.
    """

    @uncompiled
    @functools.wraps(forward)
    def method(self, *args, layer=None, **options):
        if args and _is_layer(args[0]):
            layer, args, output = args[0], args[1:6], args[6:]
            options |= dict(zip(("output",), output, strict=False))
        if self.cache_dtype is not None:
            options = _scales_of(layer) | options
        return forward(self, *args, **options)

    return method


def _scales_of(layer) -> dict:
    names = ("k_scale", "v_scale")
    return {name: getattr(layer, f"_{name}") for name in names if hasattr(layer, f"_{name}")}


def _is_layer(value) -> bool:
    return isinstance(value, torch.nn.Module) or hasattr(value, "_k_scale")


class Fresh(NamedTuple):
    """The new keys and values that a call brings: `[num_keys, num_kv_heads, head_size]`."""

    key: Tensor
    value: Tensor

    def first(self, count: int) -> "Fresh":
        return Fresh(self.key[:count], self.value[:count])


class LayerCall(NamedTuple):
    """One call of a layer: its type of attention, and its arrays with heads as an axis."""

    kind: AttentionType
    query: Tensor
    fresh: Fresh | None
    cache: KVCache | None


def heads(name: str, packed: Tensor, num_heads: int, head_size: int) -> Tensor:
    """A tensor as `[num_tokens, num_heads, head_size]`.

    It may have the last two axes as one, and further axes in front.
    """
    require_tensors(**{name: packed})
    require_no_grad(packed)
    shape = packed.shape
    apart = len(shape) > 2 and shape[-2:] == (num_heads, head_size)
    if not apart and (len(shape) < 2 or shape[-1] != num_heads * head_size):
        raise InvalidInputError(
            f"{name} must be [num_tokens, {num_heads}, {head_size}] or [num_tokens, "
            f"{num_heads * head_size}], got {list(shape)}"
        )
    return packed.reshape(-1, num_heads, head_size)


def fresh_keys(key: Tensor | None, value: Tensor | None, sizes: tuple[int, int]) -> Fresh | None:
    """Key and value, with `sizes` as their last axes; None if the call brings none."""
    if (key is None) != (value is None):
        raise InvalidInputError(
            "key and value must both be given or both be None, got "
            + ("value alone" if key is None else "key alone")
        )
    if key is None or value is None:
        return None
    rows, values = heads("key", key, *sizes), heads("value", value, *sizes)
    if rows.shape != values.shape:
        raise InvalidInputError(f"got {len(rows)} keys and {len(values)} values")
    return Fresh(with_dense_rows(rows), with_dense_rows(values))


def require_metadata(meta) -> None:
    if not isinstance(meta, AttentionMetadata):
        raise InvalidInputError(
            f"attn_metadata must be an AttentionMetadata, got {type(meta).__name__}"
        )


def check_counts(query: Tensor, fresh: Fresh | None, meta, kind: AttentionType) -> None:
    """Requires as many query and key tokens as the metadata says for a type of attention."""
    encoder = kind in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER)
    batches.require_fields(meta, kind, paged=fresh is None)
    num_keys = meta.num_encoder_tokens if encoder else meta.num_query_tokens(kind)
    expected = meta.num_query_tokens(kind), num_keys
    got = len(query), num_keys if fresh is None else len(fresh.key)
    if got != expected:
        raise InvalidInputError(
            f"attn_metadata expects {expected[0]} query and {expected[1]} key tokens for {kind} "
            f"attention, got {got[0]} and {got[1]}"
        )


def check_output(output: Tensor | None, rows: Tensor) -> None:
    """Requires an `output` like the query, whose form by `heads` is `rows`; None is fine."""
    if output is None:
        return
    shape = heads("output", output, *rows.shape[1:]).shape
    require_writable(output=output)
    if not (shape == rows.shape and output.dtype == rows.dtype and output.device == rows.device):
        raise InvalidInputError(
            f"output must be {rows.dtype} for {len(rows)} tokens on {rows.device}, as query is, "
            f"got {output.dtype} for {shape[0]} on {output.device}"
        )


def require_readable(query: Tensor, fresh: Fresh | None, cache: KVCache | None) -> None:
    """Requires tensors all with memory, or all without, and a cache that can be written to."""
    tensors = {"query": query} | (fresh._asdict() if fresh else {})
    if cache is None:
        require_alike(**tensors)
    elif fresh is None:
        require_alike(kv_cache=cache.key, **tensors)
    else:
        require_planes(cache, **tensors)


def require_one_device(call: LayerCall) -> None:
    key, value = call.fresh or (None, None)
    tensors = {"query": call.query, "key": key, "value": value}
    tensors |= {"kv_cache": None if call.cache is None else call.cache.key}
    places = {name: str(x.device) for name, x in tensors.items() if x is not None}
    if not len(set(places.values())) <= 1:
        raise InvalidInputError(f"tensors must lie on one device, got {places}")


def require_unit_scales(**scales) -> None:
    for name, scale in scales.items():
        if type(scale) is float and scale == 1.0:
            continue
        if isinstance(scale, Tensor) and scale.device.type != "cpu":
            raise UnsupportedError(
                f"{name} is a tensor on {scale.device}, and reading it would wait for the device; "
                "give the number 1.0"
            )
        if isinstance(scale, Tensor):
            require_memory(name, scale)
            one = bool((scale == 1.0).all())
        else:
            one = isinstance(scale, float | int | np.number) and scale == 1.0
        if not one:
            raise UnsupportedError(
                f"{name} must be 1.0, since the cache is not quantised, got {shown(scale)}"
            )
