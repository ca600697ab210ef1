"""The IPEX backend for JAX arrays; importing this says what is missing for it."""

import dataclasses

from pagedattn import BackendUnavailableError
from pagedattn_torch import ipex_kernels, ipex_ops

from .backends import bridged, too_little_work

if reasons := ipex_ops.why_unusable():
    raise BackendUnavailableError("; ".join(reasons))
IPEX = dataclasses.replace(bridged(ipex_kernels.BACKEND), unfit=too_little_work)
