"""The nine classes that engines know: backend, metadata and layer of three systems."""

from typing import ClassVar

from pagedattn._dispatch.call import Call

from ..backends.ipex import lacks_alibi
from .backend import AttentionBackend
from .builder import MetadataBuilder
from .impl import AttentionImpl
from .metadata import AttentionMetadata


class XFormersMetadata(AttentionMetadata):
    """The metadata of a step for XFormersImpl."""


class XFormersMetadataBuilder(MetadataBuilder):
    """Makes the metadata of a step for XFormersImpl."""

    metadata_cls = XFormersMetadata


class XFormersImpl(AttentionImpl):
    """A layer on xFormers' memory-efficient attention."""

    backend = "xformers"


class XFormersBackend(AttentionBackend):
    """xFormers' memory-efficient attention, on CUDA."""

    name = "XFORMERS"
    impl_cls: ClassVar[type[AttentionImpl]] = XFormersImpl
    metadata_cls: ClassVar[type[AttentionMetadata]] = XFormersMetadata
    builder_cls: ClassVar[type[MetadataBuilder]] = XFormersMetadataBuilder


class TorchSDPAMetadata(AttentionMetadata):
    """The metadata of a step for TorchSDPABackendImpl."""


class TorchSDPAMetadataBuilder(MetadataBuilder):
    """Makes the metadata of a step for TorchSDPABackendImpl."""

    metadata_cls = TorchSDPAMetadata


class TorchSDPABackendImpl(AttentionImpl):
    """A layer on PyTorch's scaled_dot_product_attention."""

    backend = "sdpa"


class TorchSDPABackend(AttentionBackend):
    """PyTorch's scaled_dot_product_attention: every feature, any torch device."""

    name = "TORCH_SDPA"
    impl_cls: ClassVar[type[AttentionImpl]] = TorchSDPABackendImpl
    metadata_cls: ClassVar[type[AttentionMetadata]] = TorchSDPAMetadata
    builder_cls: ClassVar[type[MetadataBuilder]] = TorchSDPAMetadataBuilder


class IpexAttnMetadata(AttentionMetadata):
    """The metadata of a step for IpexAttnBackendImpl."""


class IpexAttnMetadataBuilder(MetadataBuilder):
    """Makes the metadata of a step for IpexAttnBackendImpl."""

    metadata_cls = IpexAttnMetadata


class IpexAttnBackendImpl(AttentionImpl):
    """A layer on the kernels of Intel's extension for PyTorch.

    The extension has no right kernel for ALiBi in prompts: SDPA computes these, with a bias.
    """

    backend = "ipex"

    def backend_of(self, call: Call) -> str:
        return "sdpa" if lacks_alibi(call) else self.backend


class IpexAttnBackend(AttentionBackend):
    """The kernels of Intel's extension for PyTorch, on Intel CPUs and XPUs."""

    name = "IPEX"
    impl_cls: ClassVar[type[AttentionImpl]] = IpexAttnBackendImpl
    metadata_cls: ClassVar[type[AttentionMetadata]] = IpexAttnMetadata
    builder_cls: ClassVar[type[MetadataBuilder]] = IpexAttnMetadataBuilder

    @staticmethod
    def get_kv_cache_stride_order(device_type: str = "cpu") -> tuple[int, ...]:
        """On a CPU heads before slots, which decodes read twice as fast as the logical order."""
        return (0, 1, 3, 2, 4) if device_type == "cpu" else (0, 1, 2, 3, 4)
