"""The IPEX backend for JAX arrays; importing this says what is missing for it."""

from importlib.util import find_spec

from pagedattn import BackendUnavailableError
from pagedattn_torch import ipex

from .backends import bridged

if find_spec("intel_extension_for_pytorch") is None:
    raise BackendUnavailableError(
        "intel_extension_for_pytorch is not installed: "
        "pip install torch==2.8.0 intel-extension-for-pytorch==2.8.0"
    )
IPEX = bridged(ipex.BACKEND)
