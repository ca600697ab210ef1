"""Paged attention by xFormers, on CUDA; and the XFormers classes, an engine's view of it."""

from importlib.util import find_spec

from pagedattn import UnsupportedError
from pagedattn.backend import Backend

from .backend import AttentionBackend
from .impl import AttentionImpl
from .metadata import AttentionMetadata


def unsupported(query, cache, batch, spec, return_lse) -> list[str]:
    reasons = []
    if find_spec("xformers") is None:
        reasons.append("xformers is not installed: pip install xformers==0.0.35")
    if query.device.type != "cuda":
        reasons.append(f"xformers runs on CUDA tensors, the query lies on {query.device}")
    return [*reasons, "its kernels are not in this version of pagedattn"]


def run(query, cache, batch, spec, return_lse):
    raise UnsupportedError("; ".join(unsupported(query, cache, batch, spec, return_lse)))


BACKEND = Backend("xformers", unsupported, run)


class XFormersMetadata(AttentionMetadata):
    """The step of an XFormersImpl."""


class XFormersImpl(AttentionImpl):
    """A layer on xFormers' memory-efficient attention."""

    backend = "xformers"


class XFormersBackend(AttentionBackend):
    """xFormers' memory-efficient attention, on CUDA."""

    name = "XFORMERS"
    impl_cls = XFormersImpl
    metadata_cls = XFormersMetadata
