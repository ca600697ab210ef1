"""The cache operations that vLLM's models and backends call by themselves, by its names."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagedattn import BatchMetadata, InvalidInputError, KVCache
from pagedattn._arrays.inspect import shown

from ..arrays import int32, require_tensors, tensor
from ..attention import paged_attention
from ..cache import write_kv_
from ..layout import kv_cache_shape, split_kv_cache
from .attention_type import AttentionType
from .backend import AttentionBackend, Pairs
from .inputs import require_unit_scales
from .quantised import as_quantised, cache_dtype
from .settings import specs_by_type


class PagedAttention:
    """Writes to a layer's cache, and attention over it, without the layer's classes.

    Keys and values are planes `[num_blocks, block_size, num_kv_heads, head_size]`, as
    `split_kv_cache` gives them.

    >>> kv_cache = torch.zeros(PagedAttention.get_kv_cache_shape(4, 16, 2, 32))
    >>> key_cache, value_cache = PagedAttention.split_kv_cache(kv_cache, 2, 32)
    >>> new = torch.ones(1, 2, 32)
    >>> PagedAttention.write_to_paged_cache(new, new, key_cache, value_cache, torch.tensor([17]))
    >>> kv_cache[0, 1, 1].sum()
    tensor(64.)
    """

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """The head sizes that every backend takes; several take any."""
        return AttentionBackend.get_supported_head_sizes()

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """The shape of one layer's cache: `kv_cache_shape`."""
        return kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def split_kv_cache(
        kv_cache: Tensor | KVCache, num_kv_heads: int, head_size: int
    ) -> tuple[Tensor, Tensor]:
        """The planes of a layer's cache, keys and values; writing to them writes to it."""
        cache = split_kv_cache(kv_cache, num_kv_heads, head_size)
        return cache.planes[0], cache.planes[-1]

    @staticmethod
    def write_to_paged_cache(
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str = "auto",
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
    ) -> None:
        """Writes new keys and values `[num_tokens, num_kv_heads, head_size]`; slot -1 writes none.

        Raises:
          InvalidInputError, UnsupportedError: as `write_kv_`, and another kv_cache_dtype.
        """
        cache = _cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
        write_kv_(cache, key, value, tensor("slot_mapping", slot_mapping).flatten())

    @staticmethod
    def forward_decode(
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        kv_cache_dtype: str,
        num_kv_heads: int,
        scale: float,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Attention of one query for each sequence: `[num_seqs, num_heads, head_size]`.

        Args:
          max_seq_len: not needed, since the width of `block_tables` is a bound, too.
        """
        cache = _cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
        if num_kv_heads != cache.num_kv_heads:
            raise InvalidInputError(
                f"num_kv_heads must be the cache's {cache.num_kv_heads}, got {shown(num_kv_heads)}"
            )
        require_tensors(query=query)
        starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
        return _attend(query, cache, block_tables, seq_lens, starts, 1, scale, alibi_slopes, None)

    @staticmethod
    def forward_prefix(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache_dtype: str,
        key_cache: Tensor,
        value_cache: Tensor,
        block_tables: Tensor,
        query_start_loc: Tensor,
        seq_lens_tensor: Tensor,
        context_lens: Tensor,
        max_query_len: int,
        alibi_slopes: Tensor | Sequence[float] | None = None,
        sliding_window: int | None = None,
        k_scale: float | Tensor = 1.0,
        v_scale: float | Tensor = 1.0,
    ) -> Tensor:
        """Causal attention of packed new tokens, which the cache holds already, to all keys.

        Args:
          key, value: the new tokens', which are read from the cache.
          context_lens: as query_start_loc and seq_lens_tensor say.
        """
        cache = _cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale)
        starts = int32(tensor("query_start_loc", query_start_loc))
        return _attend(
            query, cache, block_tables, seq_lens_tensor, starts, max_query_len, None, alibi_slopes,
            sliding_window,
        )  # fmt: skip

    @staticmethod
    def swap_blocks(src_kv_cache: Tensor, dst_kv_cache: Tensor, src_to_dst: Pairs) -> None:
        """As `AttentionBackend.swap_blocks`."""
        AttentionBackend.swap_blocks(src_kv_cache, dst_kv_cache, src_to_dst)

    @staticmethod
    def copy_blocks(kv_caches: Sequence[Tensor], src_to_dists: Pairs) -> None:
        """As `AttentionBackend.copy_blocks`."""
        AttentionBackend.copy_blocks(kv_caches, src_to_dists)


def _cache(key_cache, value_cache, kv_cache_dtype, k_scale, v_scale) -> KVCache:
    cache, dtype = KVCache(key_cache, value_cache), cache_dtype(kv_cache_dtype)
    require_tensors(key_cache=key_cache, value_cache=value_cache)
    if dtype is not None:
        return as_quantised(cache, dtype, k_scale, v_scale)
    require_unit_scales(k_scale=k_scale, v_scale=v_scale)
    return cache


def _attend(query, cache, tables, seq_lens, starts, longest, scale, slopes, window) -> Tensor:
    require_tensors(query=query)
    unread = torch.full((len(query),), -1, dtype=torch.int32, device=starts.device)
    batch = BatchMetadata(
        block_tables=tables,
        seq_lens=int32(tensor("seq_lens", seq_lens)),
        query_start_loc=starts,
        slot_mapping=unread,
        positions=unread,
        block_size=cache.block_size,
        max_query_len=longest,
    )
    spec = specs_by_type(scale, window, None, slopes)[AttentionType.DECODER]
    return paged_attention(query, cache, batch, spec)
