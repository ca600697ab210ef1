"""Paged attention by Intel's extension for PyTorch, on Intel CPUs and XPUs."""

from importlib.util import find_spec

from torch import Tensor

from pagedattn import UnsupportedError
from pagedattn.backend import Backend
from pagedattn.registry import platform_of

from .backend import AttentionBackend
from .impl import AttentionImpl
from .metadata import AttentionMetadata


def unsupported(query, cache, batch, spec, return_lse) -> list[str]:
    reasons = []
    if find_spec("intel_extension_for_pytorch") is None:
        reasons.append(
            "intel_extension_for_pytorch is not installed: "
            "pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0"
        )
    device = query.device.type if isinstance(query, Tensor) else platform_of(query)
    if device not in ("cpu", "xpu"):
        reasons.append(f"ipex runs on CPU and XPU tensors, the query lies on {device}")
    return [*reasons, "its kernels are not in this version of pagedattn"]


def run(query, cache, batch, spec, return_lse):
    raise UnsupportedError("; ".join(unsupported(query, cache, batch, spec, return_lse)))


BACKEND = Backend("ipex", unsupported, run)


class IpexAttnMetadata(AttentionMetadata):
    """The step of an IpexAttnBackendImpl."""


class IpexAttnBackendImpl(AttentionImpl):
    """A layer on the kernels of Intel's extension for PyTorch."""

    backend = "ipex"


class IpexAttnBackend(AttentionBackend):
    """The kernels of Intel's extension for PyTorch, on Intel CPUs and XPUs."""

    name = "IPEX"
    impl_cls = IpexAttnBackendImpl
    metadata_cls = IpexAttnMetadata
