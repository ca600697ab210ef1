"""Paged attention for JAX at hardware speed, with PyTorch's kernels reached through DLPack."""

from .attention import explain as explain
from .attention import paged_attention as paged_attention
from .attention import ragged_attention as ragged_attention
from .attention import select_backend as select_backend
from .backend import Backend as Backend
from .batch import BatchMetadata as BatchMetadata
from .cache import KVCache as KVCache
from .cache import init_kv_cache as init_kv_cache
from .errors import BackendUnavailableError as BackendUnavailableError
from .errors import InvalidInputError as InvalidInputError
from .errors import OutOfBlocksError as OutOfBlocksError
from .errors import PagedAttentionError as PagedAttentionError
from .errors import UnsupportedError as UnsupportedError
from .make_batch import make_batch as make_batch
from .pool.block_pool import BlockPool as BlockPool
from .pool.block_pool import batch_from_pool as batch_from_pool
from .pool.block_pool import init_block_pool as init_block_pool
from .pool.growth import Growth as Growth
from .pool.growth import append_tokens as append_tokens
from .pool.sharing import drop_blocks as drop_blocks
from .pool.sharing import fork as fork
from .pool.sharing import hold_blocks as hold_blocks
from .pool.sharing import release as release
from .pool.sharing import share_blocks as share_blocks
from .pool.swapping import Swap as Swap
from .pool.swapping import swap_in as swap_in
from .pool.swapping import swap_out as swap_out
from .ragged import positions as positions
from .ragged import slot_mapping as slot_mapping
from .registry import available_backends as available_backends
from .spec import AttentionSpec as AttentionSpec
from .spec import alibi_slopes as alibi_slopes
from .state import merge_states as merge_states
from .visibility import alibi_bias as alibi_bias
from .visibility import attention_bias as attention_bias
from .visibility import causal_mask as causal_mask
from .visibility import sliding_window_mask as sliding_window_mask
from .writes import copy_blocks as copy_blocks
from .writes import fill_blocks as fill_blocks
from .writes import swap_blocks as swap_blocks
from .writes import write_kv as write_kv

__version__ = "0.2.0"
