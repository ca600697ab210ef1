"""Torch's functions for attention of dense rectangles: they return out and log-sum-exps.

query `[size, kv_heads, rows, head_dim]`, key and value `[size, kv_heads, keys, dim]`; `added` is
added to the logits, `[size, 1 or kv_heads, rows, keys]` or None. Of the value's columns the first
`call.out_dim` count: in a latent cache it is the key.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from pagedattn._arrays.namespace import wide_dtype
from pagedattn._dispatch.call import Call

from ..bias import aligned, exact_dtype


def choose(call: Call) -> Callable:
    """The fastest of torch's functions that honours all that the call asks for."""
    if call.spec.logits_soft_cap is not None:
        return _plain
    if call.device == "cpu":
        return _flash_on_cpu
    # Elsewhere SDPA gives no lse, and takes a bias in the queries' dtype: too coarse in halves.
    if not call.adds_to_logits and not call.return_lse:
        return _fused
    aligned_rows = call.head_dim % 8 == call.out_dim % 8 == 0
    return _efficient if call.device == "cuda" and aligned_rows else _plain


def _flash_on_cpu(call, query, key, value, added):
    # F.scaled_dot_product_attention runs this on a CPU; called directly, it gives lse too. It takes
    # rows of one width: zeros in keys add nothing to logits, and values give columns that are cut.
    if key.shape[3] != value.shape[3]:
        width = max(key.shape[3], value.shape[3])
        query, key, value = (_widened(part, width) for part in (query, key, value))
    # Beside queries of float64 it reads what is added as float64, too, whatever it is.
    added = None if added is None else added.to(wide_dtype(query))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(
        query, key, value, attn_mask=added, scale=call.scale
    )
    return out[..., : call.out_dim], lse


def _widened(rows, width):
    missing = width - rows.shape[3]
    return F.pad(rows, (0, missing)) if missing else rows


def _efficient(call, query, key, value, added):
    # A kernel that F.scaled_dot_product_attention may run; called directly, it gives lse too.
    dtype = exact_dtype(query, call)
    parts = query, key, value[..., : call.out_dim]
    query, key, value = (part.to(dtype) for part in parts)
    added = aligned(added, dtype).expand(-1, query.shape[1], -1, -1)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, added, True, scale=call.scale
    )
    return out, lse[:, :, : query.shape[2]]


def _fused(call, query, key, value, added):
    added = None if added is None else added.to(query.dtype)
    scale, value = call.scale, value[..., : call.out_dim]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=added, scale=scale)
    return out, out.new_zeros(out.shape[:3], dtype=torch.float32)


def _plain(call, query, key, value, added):
    wide = wide_dtype(query)
    logits = query.to(wide) @ key.to(wide).mT * call.scale
    if (cap := call.spec.logits_soft_cap) is not None:
        logits = cap * torch.tanh(logits / cap)
    logits = logits if added is None else logits + added
    lse = logits.logsumexp(dim=3)
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0)[..., None]).exp()
    return weights @ value[..., : call.out_dim].to(wide), lse
