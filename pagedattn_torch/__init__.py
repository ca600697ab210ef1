"""Paged attention on torch tensors: the functions of pagedattn, over torch's own kernels."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from pagedattn import BackendUnavailableError

    raise BackendUnavailableError(
        "pagedattn_torch needs torch, which is not installed: pip install 'pagedattn[torch]'"
    ) from error

from .attention import paged_attention as paged_attention
from .attention import ragged_attention as ragged_attention
from .cache import copy_blocks_ as copy_blocks_
from .cache import swap_blocks_ as swap_blocks_
from .cache import write_kv_ as write_kv_
