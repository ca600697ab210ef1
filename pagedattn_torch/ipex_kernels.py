"""Paged attention by Intel's extension for PyTorch 2.8, on CPUs and XPUs.

The extension is archived: 2.8 is its last release, and it needs torch 2.8. What its operators get
wrong is kept from them here and in the files of the two devices; what they cannot do is refused.
"""

import dataclasses

import torch
from torch import Tensor

from pagedattn.backend import Backend
from pagedattn.registry import platform_of

from . import ipex_cpu, ipex_xpu
from .ipex_ops import why_unusable

DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "xpu": ("bfloat16", "float16")}
DEVICES = {"cpu": ipex_cpu, "xpu": ipex_xpu}


def unsupported(query, cache, batch, spec, return_lse) -> list[str]:
    """Why the extension cannot honour a call on tensors or JAX arrays."""
    device, dtype = device_type(query), str(query.dtype).removeprefix("torch.")
    reasons = why_unusable()
    if device not in DEVICES:
        return [*reasons, f"ipex runs on CPU and XPU tensors, the query lies on {device}"]
    if dtype not in DTYPES[device]:
        reasons.append(f"ipex takes {', '.join(DTYPES[device])} on {device}, not {dtype}")
    if return_lse:
        reasons.append("return_lse: ipex gives no lse")
    return reasons + DEVICES[device].unsupported(cache, batch, spec)


def lacks_alibi(query, cache, batch, spec) -> bool:
    """Whether the extension is there, but has no ALiBi for this call."""
    device = DEVICES.get(device_type(query))
    return device is not None and not why_unusable() and device.lacks_alibi(cache, batch, spec)


def run(query: Tensor, cache, batch, spec, return_lse: bool):
    out = query.new_zeros(query.shape)
    if not (len(query) and batch.num_seqs and batch.max_blocks):
        return out, None
    if spec.sliding_window is not None and spec.sliding_window >= _farthest(batch, len(query)):
        spec = dataclasses.replace(spec, sliding_window=None)
    DEVICES[device_type(query)].attend(query, cache, batch, spec, out)
    # The operators leave NaN, or whatever they find, in rows that see no key.
    return out.masked_fill_(~_seeing(batch, spec, len(query))[:, None, None], 0), None


BACKEND = Backend("ipex", unsupported, run)


def device_type(query) -> str:
    return query.device.type if isinstance(query, Tensor) else platform_of(query)


def _farthest(batch, num_tokens: int) -> int:
    """More than any query and key can be apart."""
    return batch.max_blocks * batch.block_size + num_tokens


def _seeing(batch, spec, num_tokens: int) -> Tensor:
    """Which tokens see a key."""
    tokens = torch.arange(num_tokens, device=batch.seq_lens.device)
    owners = torch.searchsorted(batch.query_start_loc, tokens, right=True) - 1
    live = (owners >= 0) & (owners < batch.num_seqs)
    owners = owners.clamp(0, batch.num_seqs - 1)
    positions = (batch.context_lens - batch.query_start_loc[:-1])[owners] + tokens
    live &= batch.seq_lens[owners] > 0
    if spec.causal:
        return live & (positions >= 0)
    return live & (positions + (spec.sliding_window or _farthest(batch, num_tokens)) > 0)
