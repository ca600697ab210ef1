"""The TorchSDPA classes: an engine's view of the sdpa backend."""

from .backend import AttentionBackend
from .impl import AttentionImpl
from .metadata import AttentionMetadata


class TorchSDPAMetadata(AttentionMetadata):
    """The step of a TorchSDPABackendImpl."""


class TorchSDPABackendImpl(AttentionImpl):
    """A layer on PyTorch's scaled_dot_product_attention."""

    backend = "sdpa"


class TorchSDPABackend(AttentionBackend):
    """PyTorch's scaled_dot_product_attention: every feature, any torch device."""

    name = "TORCH_SDPA"
    impl_cls = TorchSDPABackendImpl
    metadata_cls = TorchSDPAMetadata
