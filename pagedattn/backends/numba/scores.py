"""Scores of blocks on a CPU: their summaries are read once, where they lie, by all threads."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..._arrays.shard_map import axes_of, varying
from .support import DTYPES, num_threads
from .targets import register_scores

__all__ = ["DTYPES", "scores"]


def scores(
    parts: Sequence[Float[Array, "num_seqs rows num_kv_heads head_dim"]],
    num_rows: Int[Array, "num_seqs"],
    planes: Sequence[Float[Array, "num_blocks num_kv_heads head_dim"]],
    blocks: Int[Array, "num_seqs max_blocks"],
) -> Float[Array, "num_seqs num_kv_heads max_blocks"]:
    """The sum over the planes of their products with a sequence's rows, and of these the greatest.

    The planes are of one of DTYPES.
    """
    dtype = str(planes[0].dtype)
    queries = jnp.stack([part.astype(dtype) for part in parts])
    num_seqs, max_blocks = blocks.shape
    out = jax.ShapeDtypeStruct((num_seqs, planes[0].shape[1], max_blocks), jnp.float32)
    kernel = jax.ffi.ffi_call(register_scores(dtype), out, vmap_method="sequential")
    arrays = queries, planes[0], planes[-1], blocks, num_rows.astype(jnp.int32)
    integers = np.asarray([len(planes), num_threads(), planes[0].dtype.itemsize], np.int64)
    return varying(kernel(*arrays, integers=integers), axes_of(arrays))
