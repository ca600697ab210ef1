"""cuDNN's attention in XLA, by a private function of JAX.

The public one, jax.nn.dot_product_attention, rounds lse to the query's dtype: in bfloat16 an error
of a few percent in a weight, too coarse to merge by.
"""

from typing import Any

import jax

try:
    from jax._src.cudnn import fused_attention_stablehlo as _cudnn
except ImportError:
    _cudnn: Any = None


def missing() -> list[str]:
    """Why this JAX has no such function; empty if it has."""
    if _cudnn is not None:
        return []
    return [f"JAX {jax.__version__} has moved its cuDNN attention; pagedattn knows 0.10 and 0.11"]


def attention(query, key, value, *, mask: str, with_lse: bool = True, **arguments):
    """out, and lse `f32[batch, heads, rows]` or None; `mask` is the name of a mask of cuDNN's."""
    results = _cudnn.dot_product_attention(
        query, key, value, mask_type=_cudnn.MaskType[mask], return_residual=with_lse, **arguments
    )
    return results if with_lse else (results, None)
