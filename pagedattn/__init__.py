"""Paged attention for JAX at hardware speed, with PyTorch's kernels reached through DLPack."""

from .attention import paged_attention as paged_attention
from .attention import ragged_attention as ragged_attention
from .batch import BatchMetadata as BatchMetadata
from .batch import make_batch as make_batch
from .bias import alibi_bias as alibi_bias
from .bias import attention_bias as attention_bias
from .bias import causal_mask as causal_mask
from .bias import sliding_window_mask as sliding_window_mask
from .blocks import positions as positions
from .blocks import slot_mapping as slot_mapping
from .cache import KVCache as KVCache
from .cache import copy_blocks as copy_blocks
from .cache import init_kv_cache as init_kv_cache
from .cache import swap_blocks as swap_blocks
from .cache import write_kv as write_kv
from .dispatch import available_backends as available_backends
from .dispatch import explain as explain
from .errors import BackendUnavailableError as BackendUnavailableError
from .errors import InvalidInputError as InvalidInputError
from .errors import OutOfBlocksError as OutOfBlocksError
from .errors import PagedAttentionError as PagedAttentionError
from .errors import UnsupportedError as UnsupportedError
from .spec import AttentionSpec as AttentionSpec
from .spec import alibi_slopes as alibi_slopes
from .state import merge_states as merge_states
