"""Paged attention for JAX at hardware speed, with PyTorch's kernels reached through DLPack."""

from ._dispatch.backend import Backend
from ._dispatch.crossings import Crossings
from ._dispatch.registry import available_backends
from ._dispatch.select import Explanation
from .attention import explain, paged_attention, ragged_attention, select_backend
from .batch.check_batch import check_batch
from .batch.draft_tree import DraftTree
from .batch.indices import positions, slot_mapping
from .batch.make_batch import make_batch
from .batch.metadata import BatchMetadata
from .cache.kv_cache import KVCache, init_kv_cache, init_latent_cache
from .cascade import cascade_attention, split_prefix
from .errors import (
    BackendUnavailableError,
    InvalidInputError,
    OutOfBlocksError,
    PagedAttentionError,
    UnsupportedError,
)
from .masks import alibi_bias, attention_bias, causal_mask, sliding_window_mask
from .merge import merge_across, merge_states
from .pool.accepting import accept_tokens
from .pool.batches import batch_from_pool, next_batch, next_batches
from .pool.block_pool import BlockPool, init_block_pool
from .pool.growth import Growth, append_tokens
from .pool.releasing import drop_blocks, release
from .pool.sharing import fork, hold_blocks, share_blocks
from .pool.swapping import Swap, swap_in, swap_out
from .pool.windows import release_behind
from .selection.choice import select_blocks
from .selection.scores import score_blocks
from .selection.selection import Selection
from .selection.summaries import BlockSummaries, summarise_blocks, update_summaries
from .spec import AttentionSpec, alibi_slopes
from .writes import copy_blocks, fill_blocks, swap_blocks, write_kv

__all__ = [
    "AttentionSpec",
    "Backend",
    "BackendUnavailableError",
    "BatchMetadata",
    "BlockPool",
    "BlockSummaries",
    "Crossings",
    "DraftTree",
    "Explanation",
    "Growth",
    "InvalidInputError",
    "KVCache",
    "OutOfBlocksError",
    "PagedAttentionError",
    "Selection",
    "Swap",
    "UnsupportedError",
    "__version__",
    "accept_tokens",
    "alibi_bias",
    "alibi_slopes",
    "append_tokens",
    "attention_bias",
    "available_backends",
    "batch_from_pool",
    "cascade_attention",
    "causal_mask",
    "check_batch",
    "copy_blocks",
    "drop_blocks",
    "explain",
    "fill_blocks",
    "fork",
    "hold_blocks",
    "init_block_pool",
    "init_kv_cache",
    "init_latent_cache",
    "make_batch",
    "merge_across",
    "merge_states",
    "next_batch",
    "next_batches",
    "paged_attention",
    "positions",
    "ragged_attention",
    "release",
    "release_behind",
    "score_blocks",
    "select_backend",
    "select_blocks",
    "share_blocks",
    "sliding_window_mask",
    "slot_mapping",
    "split_prefix",
    "summarise_blocks",
    "swap_blocks",
    "swap_in",
    "swap_out",
    "update_summaries",
    "write_kv",
]

__version__ = "0.3.0"
