"""The layers' implementation of attention: written once, for every backend's kernels."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    InvalidInputError,
    KVCache,
    UnsupportedError,
)
from pagedattn.checks import is_count, require

from . import batches
from .arrays import require_no_grad, require_tensors, tensor
from .attention import packed_cache, prepare
from .attention_type import AttentionType
from .cache import write_kv_
from .layout import is_empty, split_kv_cache
from .metadata import AttentionMetadata
from .slots import check_slots


class Plan(NamedTuple):
    """What a call attends to, and the write that comes before."""

    keys: KVCache
    batch: BatchMetadata
    write: Callable[[], Any]


class AttentionImpl:
    """One attention layer; a subclass names the backend whose kernels it runs, and no others.

    Args:
      num_heads, head_size: of the queries.
      scale: factor on the dot product; None is `head_size ** -0.5`.
      num_kv_heads: None is `num_heads`.
      alibi_slopes, sliding_window, logits_soft_cap: as in `pagedattn.AttentionSpec`; None is off.
        Without causality windows and ALiBi are symmetric; in cross-attention the last query
        stands at the last key.
      kv_cache_dtype: "auto", the dtype of the keys.
      blocksparse_params: None.
      attn_type: what `forward` computes unless it is told.

    Raises:
      InvalidInputError: values out of range.
      UnsupportedError: another kv_cache_dtype, or blocksparse_params.
    """

    backend: ClassVar[str]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        blocksparse_params: dict[str, Any] | None = None,
        logits_soft_cap: float | None = None,
        attn_type: AttentionType | str = AttentionType.DECODER,
    ):
        self.num_heads, self.head_size = num_heads, head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.attn_type = AttentionType(attn_type)
        slopes: Any = alibi_slopes.tolist() if isinstance(alibi_slopes, Tensor) else alibi_slopes
        self.specs = {
            kind: AttentionSpec(
                scale=scale,
                causal=kind.causal,
                sliding_window=sliding_window,
                logits_soft_cap=logits_soft_cap,
                alibi_slopes=slopes,
            )
            for kind in AttentionType
        }
        self._check_heads()
        _require_plain_cache(kv_cache_dtype, blocksparse_params)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | KVCache | None,
        attn_metadata: AttentionMetadata,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        attn_type: AttentionType | str | None = None,
    ) -> Tensor:
        """Writes the new keys and values to the cache, then attends, in one call for any mix.

        Keys are read from the cache where there is one with block_tables, and are otherwise those
        given: encoders, profiling runs, prompts without block_tables.

        Args:
          query: `[num_tokens, num_heads * head_size]` or `[num_tokens, num_heads, head_size]`.
          key, value: likewise with num_kv_heads; for cross-attention the encoder's. Both None where
            the cache holds them already.
          kv_cache: see `layout`; None or empty in a profiling run. A token of slot -1 is not
            written: whatever stands at its position is what is read.
          attn_metadata: the step.
          k_scale, v_scale: 1.0, as numbers or tensors on the CPU.
          attn_type: None is the layer's.

        Returns:
          Shape and dtype of query.

        Raises:
          InvalidInputError, UnsupportedError: the cache is as it was. query, key and value that
            require gradients are unsupported.

        >>> import torch
        >>> from pagedattn_torch import TorchSDPABackendImpl, TorchSDPAMetadata
        >>> meta = TorchSDPAMetadata.from_lists([3], [0], [[1]], block_size=4)
        >>> layer = TorchSDPABackendImpl(num_heads=2, head_size=8)
        >>> query = key = value = torch.ones(3, 16)
        >>> layer.forward(query, key, value, torch.zeros(2, 2, 4, 2, 8), meta).shape
        torch.Size([3, 16])
        """
        kind = self.attn_type if attn_type is None else AttentionType(attn_type)
        _require_unit_scales(k_scale, v_scale)
        rows = self._rows("query", query, self.num_heads)
        fresh = self._fresh(key, value)
        _check_counts(rows, fresh, attn_metadata, kind)
        plan = self._plan(fresh, kv_cache, attn_metadata, kind)
        step = prepare(rows, plan.keys, plan.batch, self.specs[kind], backend=self.backend)
        plan.write()
        return step.attend(rows, plan.keys)[0].reshape(query.shape)

    def _plan(self, fresh, kv_cache, meta, kind) -> Plan:
        if not kind.cached or is_empty(kv_cache):
            return _packed_plan(fresh, meta, kind, _no_write)
        cache = split_kv_cache(kv_cache, self.num_kv_heads, self.head_size)
        slots = None if fresh is None else _slots(meta, kind, cache.key.device)
        write = functools.partial(_write, cache, fresh, slots)
        if kind is AttentionType.DECODER and _is_none(meta.block_tables):
            return _packed_plan(fresh, meta, kind, write)
        batch = meta.to_batch(cache.block_size, kind)
        own = batch if kind is AttentionType.DECODER else None
        return Plan(cache, batch, functools.partial(write, own))

    def _rows(self, name, packed, num_heads) -> Tensor:
        """`[tokens, num_heads, head_size]`, whichever form was given."""
        require_tensors(**{name: packed})
        require_no_grad(packed)
        shape = tuple(packed.shape)
        if shape[1:] not in ((num_heads, self.head_size), (num_heads * self.head_size,)):
            raise InvalidInputError(
                f"{name} must be [num_tokens, {num_heads}, {self.head_size}] or [num_tokens, "
                f"{num_heads * self.head_size}], got {list(shape)}"
            )
        return packed.reshape(len(packed), num_heads, self.head_size)

    def _fresh(self, key, value) -> tuple[Tensor, Tensor] | None:
        if (key is None) != (value is None):
            raise InvalidInputError(
                "key and value must both be given or both be None, got "
                + ("value alone" if key is None else "key alone")
            )
        if key is None:
            return None
        key = self._rows("key", key, self.num_kv_heads)
        value = self._rows("value", value, self.num_kv_heads)
        require(len(key) == len(value), f"got {len(key)} keys and {len(value)} values")
        return key, value

    def _check_heads(self):
        sizes = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        sizes["head_size"] = self.head_size
        for name, size in sizes.items():
            require(is_count(size), f"{name} must be above 0, got {size!r}")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads must be a multiple of num_kv_heads = {self.num_kv_heads}, got "
            f"{self.num_heads}",
        )
        slopes = self.specs[AttentionType.DECODER].alibi_slopes
        require(
            slopes is None or len(slopes) == self.num_heads,
            f"alibi_slopes must have one slope for each of the {self.num_heads} query heads, got "
            f"{len(slopes or ())}",
        )


def _packed_plan(fresh, meta, kind, write) -> Plan:
    """Attention to the keys given, as blocks of one token."""
    if fresh is None:
        raise InvalidInputError(
            f"{kind} attention needs key and value where it has no cache with block tables"
        )
    return Plan(packed_cache(*fresh), batches.packed(meta, kind), write)


def _no_write() -> None:
    """Encoders and profiling runs store no keys."""


def _write(cache, fresh, slots, batch=None) -> None:
    """Stores new keys, where the batch that is to read them, if it is theirs, will look."""
    if fresh is None:
        return
    if batch is not None:
        check_slots(batch)
    key, value = fresh
    write_kv_(cache, key, value, slots)


def _check_counts(query, fresh, meta, kind):
    if not isinstance(meta, AttentionMetadata):
        raise InvalidInputError(
            f"attn_metadata must be an AttentionMetadata, got {type(meta).__name__}"
        )
    encoder = kind in (AttentionType.ENCODER, AttentionType.ENCODER_DECODER)
    batches.require_fields(meta, kind, paged=fresh is None)
    num_keys = meta.num_encoder_tokens if encoder else meta.num_query_tokens(kind)
    expected = meta.num_query_tokens(kind), num_keys
    got = len(query), num_keys if fresh is None else len(fresh[0])
    require(
        got == expected,
        f"attn_metadata expects {expected[0]} query and {expected[1]} key tokens for {kind} "
        f"attention, got {got[0]} and {got[1]}",
    )


def _slots(meta, kind, device) -> Tensor:
    cross = kind is AttentionType.ENCODER_DECODER
    name = "cross_slot_mapping" if cross else "slot_mapping"
    slots = getattr(meta, name)
    require(slots is not None, f"{kind} attention needs {name} to write keys to the cache")
    return tensor(name, slots, device)


def _is_none(block_tables) -> bool:
    return block_tables is None or block_tables.numel() == 0


def _require_plain_cache(kv_cache_dtype, blocksparse_params):
    if kv_cache_dtype != "auto":
        raise UnsupportedError(
            f"kv_cache_dtype must be 'auto', the dtype of the keys, got {kv_cache_dtype!r}: "
            "quantised caches are not supported"
        )
    if blocksparse_params is not None:
        raise UnsupportedError("blocksparse_params must be None: every visible key is attended to")


def _require_unit_scales(k_scale, v_scale):
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if isinstance(scale, Tensor) and scale.device.type != "cpu":
            raise UnsupportedError(
                f"{name} is a tensor on {scale.device}, and reading it would wait for the device; "
                "give the number 1.0"
            )
        ones = (scale == 1.0).all() if isinstance(scale, Tensor) else scale == 1.0
        if not ones:
            raise UnsupportedError(
                f"{name} must be 1.0, since the cache is not quantised, got {scale}"
            )
