"""The xFormers backend for JAX arrays; importing this says what is missing for it."""

from pagedattn_torch import xformers_kernels
from pagedattn_torch.fmha import fmha

from .backends import bridged

fmha()
XFORMERS = bridged(xformers_kernels.BACKEND)
