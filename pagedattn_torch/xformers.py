"""The XFormers classes: an engine's view of the xformers backend."""

from .backend import AttentionBackend
from .impl import AttentionImpl
from .metadata import AttentionMetadata


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
