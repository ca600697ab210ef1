"""What an engine asks a backend for: its classes, the shape of a cache, copies of blocks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jax.core import Tracer
from jaxtyping import Int
from torch import Tensor

from pagedattn import InvalidInputError, KVCache
from pagedattn._arrays.checks import int_array
from pagedattn._arrays.inspect import shown
from pagedattn._arrays.memory import require_memory

from ..arrays import tensor
from ..cache import copy_blocks_, require_copies, swap_blocks_
from ..layout import kv_cache_shape, planes
from ..uncompiled import uncompiled
from .builder import MetadataBuilder
from .impl import AttentionImpl
from .metadata import AttentionMetadata
from .state import AttentionState

Pairs = Int[Tensor, "n 2"] | Sequence[Sequence[int]] | Mapping[int, int | Iterable[int]]


class AttentionBackend:
    """Where an engine finds the classes and the cache operations of a backend, by vLLM's names.

    >>> from pagedattn_torch import TorchSDPABackend
    >>> TorchSDPABackend.get_name(), TorchSDPABackend.get_kv_cache_shape(8, 16, 2, 64)
    ('TORCH_SDPA', (2, 8, 16, 2, 64))
    """

    name: ClassVar[str]
    impl_cls: ClassVar[type[AttentionImpl]]
    metadata_cls: ClassVar[type[AttentionMetadata]]
    builder_cls: ClassVar[type[MetadataBuilder]]
    # Tells engines not to allocate `output` for `forward`, which would only be copied to.
    accept_output_buffer: ClassVar[bool] = False

    @classmethod
    def get_name(cls) -> str:
        """The name by which engines choose it."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        """The class of its layers."""
        return cls.impl_cls

    @classmethod
    def get_metadata_cls(cls) -> type[AttentionMetadata]:
        """The class of its steps' metadata."""
        return cls.metadata_cls

    @classmethod
    def get_state_cls(cls) -> type[AttentionState]:
        """The class of what an engine keeps between steps."""
        return AttentionState

    @classmethod
    def make_metadata(cls, **fields: Any) -> AttentionMetadata:
        """A metadata object of this backend, of the fields of `AttentionMetadata`.

        Raises:
          InvalidInputError: fields contradict each other, or have wrong shapes or dtypes.
        """
        return cls.metadata_cls(**fields)

    @classmethod
    def get_builder_cls(cls) -> type[MetadataBuilder]:
        """The class that makes its steps' metadata of what vLLM's model runners gather."""
        return cls.builder_cls

    @classmethod
    def make_metadata_builder(cls, input_builder: Any) -> MetadataBuilder:
        """A builder of this backend's metadata, for a model runner's input builder."""
        return cls.get_builder_cls()(input_builder)

    @staticmethod
    def advance_step(
        model_input: Any,
        sampled_token_ids: Tensor | None,
        block_size: int,
        num_seqs: int,
        num_queries: int,
    ) -> None:
        """`AttentionMetadata.advance_step` of `model_input.attn_metadata`."""
        model_input.attn_metadata.advance_step(
            model_input, sampled_token_ids, block_size, num_seqs, num_queries
        )

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """The head sizes that every backend takes; several take any."""
        return list(range(8, 257, 8))

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """The shape of one layer's cache, the same for every backend: `kv_cache_shape`."""
        return kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(device_type: str = "cpu") -> tuple[int, ...]:
        """The order of a cache's axes, outermost in memory first, that is fastest on a device.

        Results are right with any order. `layout.empty_kv_cache` allocates a cache in a given one.
        """
        return (0, 1, 2, 3, 4)

    @staticmethod
    @uncompiled
    def swap_blocks(
        src_kv_cache: Tensor | KVCache, dst_kv_cache: Tensor | KVCache, src_to_dst: Pairs
    ) -> None:
        """Copies blocks of one layer's cache into another's, in place, between devices too.

        Args:
          src_to_dst: pairs `[n, 2]` of a source block and its destination, or a dict.

        Raises:
          InvalidInputError: caches or pairs of wrong shapes, blocks outside the caches.

        >>> here, there = torch.ones(2, 3, 1, 1, 1), torch.zeros(2, 3, 1, 1, 1)
        >>> AttentionBackend.swap_blocks(here, there, {0: 2})
        >>> there[0].flatten()
        tensor([0., 0., 1.])
        """
        swap_blocks_(planes(src_kv_cache), planes(dst_kv_cache), *_columns(src_to_dst))

    @staticmethod
    @uncompiled
    def copy_blocks(kv_caches: Sequence[Tensor | KVCache], src_to_dists: Pairs) -> None:
        """Copies blocks within the cache of every layer, in place.

        Every source is read as it was before, so a block may be both source and destination.

        Args:
          src_to_dists: pairs `[n, 2]`, or a dict from a source to its destinations.

        Raises:
          InvalidInputError: caches or pairs of wrong shapes, blocks outside a cache. Then no cache
            has been written.

        >>> cache = torch.arange(3.0).expand(2, 3).reshape(2, 3, 1, 1, 1).clone()
        >>> AttentionBackend.copy_blocks([cache], {0: [1], 1: [2]})
        >>> cache[0].flatten()
        tensor([0., 0., 1.])
        """
        caches, (src, dst) = _planes(kv_caches), _columns(src_to_dists)
        for cache in caches:  # check all before writing to the first
            require_copies(cache, cache, src, dst)
        for cache in caches:
            copy_blocks_(cache, src, dst)


def _planes(kv_caches) -> list[KVCache]:
    if not (isinstance(kv_caches, Sequence | Tensor) and getattr(kv_caches, "ndim", 1) > 0):
        raise InvalidInputError(
            f"kv_caches must be a list of a cache for each layer, got {type(kv_caches).__name__}"
        )
    return [planes(cache) for cache in kv_caches]


def _columns(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Sources and destinations."""
    if isinstance(pairs, Mapping):
        pairs = [(src, dst) for src, dsts in pairs.items() for dst in _several(dsts)]
    table = _table(pairs)
    table = table.reshape(0, 2).long() if table.numel() == 0 else table
    int_array("block pairs", table, 2)
    if table.shape[1] != 2:
        raise InvalidInputError(
            f"block pairs must be [n, 2], a source and a destination each, got {list(table.shape)}"
        )
    return table[:, 0], table[:, 1]


def _table(pairs) -> Tensor:
    if hasattr(pairs, "__dlpack__"):
        return tensor("block pairs", pairs)
    require_memory("block pairs", pairs)
    try:
        return torch.tensor(pairs, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInputError(
            "block pairs must be [n, 2] integers, a source and a destination each, or a dict from "
            f"a source to its destinations, got {shown(pairs)}"
        ) from error


def _several(ids):
    """The ids, whether one or many are given."""
    if isinstance(ids, Tracer):
        raise InvalidInputError("block pairs must be known here, but are traced by JAX")
    require_memory("block pairs", ids)
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    return ids if isinstance(ids, Iterable) else (ids,)
