"""The IpexAttn classes: an engine's view of the ipex backend."""

from .backend import AttentionBackend
from .impl import AttentionImpl
from .ipex_kernels import BACKEND as BACKEND
from .ipex_kernels import lacks_alibi
from .metadata import AttentionMetadata


class IpexAttnMetadata(AttentionMetadata):
    """The step of an IpexAttnBackendImpl."""


class IpexAttnBackendImpl(AttentionImpl):
    """A layer on the kernels of Intel's extension for PyTorch.

    ALiBi of prompts, for which the extension has no right kernel, is computed by SDPA with a bias.
    """

    backend = "ipex"

    def backend_of(self, query, keys, batch, spec) -> str:
        return "sdpa" if lacks_alibi(query, keys, batch, spec) else self.backend


class IpexAttnBackend(AttentionBackend):
    """The kernels of Intel's extension for PyTorch, on Intel CPUs and XPUs."""

    name = "IPEX"
    impl_cls = IpexAttnBackendImpl
    metadata_cls = IpexAttnMetadata

    @staticmethod
    def get_kv_cache_stride_order(device_type: str = "cpu") -> tuple[int, ...]:
        """On a CPU heads before slots: decode reads that twice as fast as the logical order."""
        return (0, 1, 3, 2, 4) if device_type == "cpu" else (0, 1, 2, 3, 4)
