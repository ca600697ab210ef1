"""Paged attention on torch tensors: the functions of pagedattn, over torch's own kernels."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from pagedattn import BackendUnavailableError

    raise BackendUnavailableError(
        "pagedattn_torch needs torch, which is not installed: pip install 'pagedattn[torch]'"
    ) from error

from .attention import Step as Step
from .attention import explain as explain
from .attention import paged_attention as paged_attention
from .attention import prepare as prepare
from .attention import ragged_attention as ragged_attention
from .attention import select_backend as select_backend
from .cache import copy_blocks_ as copy_blocks_
from .cache import swap_blocks_ as swap_blocks_
from .cache import write_kv_ as write_kv_
from .layers.attention_type import AttentionType as AttentionType
from .layers.backend import AttentionBackend as AttentionBackend
from .layers.classes import IpexAttnBackend as IpexAttnBackend
from .layers.classes import IpexAttnBackendImpl as IpexAttnBackendImpl
from .layers.classes import IpexAttnMetadata as IpexAttnMetadata
from .layers.classes import TorchSDPABackend as TorchSDPABackend
from .layers.classes import TorchSDPABackendImpl as TorchSDPABackendImpl
from .layers.classes import TorchSDPAMetadata as TorchSDPAMetadata
from .layers.classes import XFormersBackend as XFormersBackend
from .layers.classes import XFormersImpl as XFormersImpl
from .layers.classes import XFormersMetadata as XFormersMetadata
from .layers.impl import AttentionImpl as AttentionImpl
from .layers.metadata import AttentionMetadata as AttentionMetadata
from .layers.state import AttentionState as AttentionState
from .layout import empty_kv_cache as empty_kv_cache
from .layout import kv_cache_shape as kv_cache_shape
from .layout import pack_keys as pack_keys
from .layout import pack_values as pack_values
from .layout import split_kv_cache as split_kv_cache
from .layout import unpack_keys as unpack_keys
from .layout import unpack_values as unpack_values
