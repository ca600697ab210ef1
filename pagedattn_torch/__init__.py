"""Paged attention on torch tensors: the functions of pagedattn, over torch's own kernels."""

try:
    import torch as _torch  # noqa: F401  (is it installed?)
except ImportError as error:
    from pagedattn import BackendUnavailableError

    raise BackendUnavailableError(
        "pagedattn_torch needs torch, which is not installed: pip install 'pagedattn[torch]' (on a "
        "CPU, torch's build for CPUs first: docs/install.md)"
    ) from error

from .attention import explain, paged_attention, ragged_attention, select_backend
from .cache import copy_blocks_, swap_blocks_, write_kv_
from .layers.attention_type import AttentionType
from .layers.backend import AttentionBackend
from .layers.builder import MetadataBuilder
from .layers.classes import (
    IpexAttnBackend,
    IpexAttnBackendImpl,
    IpexAttnMetadata,
    TorchSDPABackend,
    TorchSDPABackendImpl,
    TorchSDPAMetadata,
    XFormersBackend,
    XFormersImpl,
    XFormersMetadata,
)
from .layers.impl import AttentionImpl
from .layers.metadata import AttentionMetadata
from .layers.paged_attention import PagedAttention
from .layers.state import AttentionState
from .layout import (
    empty_kv_cache,
    kv_cache_shape,
    pack_keys,
    pack_values,
    split_kv_cache,
    unpack_keys,
    unpack_values,
)
from .new_cache import init_kv_cache, init_latent_cache
from .step import Step, prepare

__all__ = [
    "AttentionBackend",
    "AttentionImpl",
    "AttentionMetadata",
    "AttentionState",
    "AttentionType",
    "IpexAttnBackend",
    "IpexAttnBackendImpl",
    "IpexAttnMetadata",
    "MetadataBuilder",
    "PagedAttention",
    "Step",
    "TorchSDPABackend",
    "TorchSDPABackendImpl",
    "TorchSDPAMetadata",
    "XFormersBackend",
    "XFormersImpl",
    "XFormersMetadata",
    "copy_blocks_",
    "empty_kv_cache",
    "explain",
    "init_kv_cache",
    "init_latent_cache",
    "kv_cache_shape",
    "pack_keys",
    "pack_values",
    "paged_attention",
    "prepare",
    "ragged_attention",
    "select_backend",
    "split_kv_cache",
    "swap_blocks_",
    "unpack_keys",
    "unpack_values",
    "write_kv_",
]
