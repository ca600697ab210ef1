"""The IPEX backend for JAX arrays; importing this says what is missing for it."""

from pagedattn import BackendUnavailableError
from pagedattn_torch import ipex_kernels, ipex_ops

from .backends import bridged

if reasons := ipex_ops.why_unusable():
    raise BackendUnavailableError("; ".join(reasons))
IPEX = bridged(ipex_kernels.BACKEND)
