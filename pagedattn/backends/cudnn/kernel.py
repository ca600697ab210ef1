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
    return [f"JAX {jax.__version__} has moved its cuDNN attention; pagedattn knows 0.10 to 0.12"]


def attention(query, key, value, lens, *, mask: str, with_lse: bool = True, **options):
    """out, and lse `f32[batch, heads, rows]` or None; `mask` is the name of a mask of cuDNN's.

    With jax.vmap one call follows the other: JAX's own rule has no way for packed sequences, nor in
    0.10 for arguments of which only some are mapped.

    Args:
      lens: lengths and offsets, by cuDNN's names for them.
    """
    options |= {"mask_type": _cudnn.MaskType[mask], "return_residual": with_lse}

    @jax.custom_batching.sequential_vmap
    def kernel(query, key, value, lens):
        return _cudnn.dot_product_attention(query, key, value, **lens, **options)

    results = kernel(query, key, value, lens)
    return results if with_lse else (results, None)
