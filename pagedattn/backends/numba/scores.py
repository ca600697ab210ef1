"""Scores of blocks on a CPU, whose summaries are read once by all threads, and the choice."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..._arrays.shard_map import axes_of, varying
from .support import DTYPES, num_threads
from .targets import CHOOSE_BEST, register_choice, register_scores

__all__ = ["DTYPES", "MOST_COLUMNS", "best", "scores"]

MOST_COLUMNS = 1 << 31


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


def best(
    scores: Float[Array, "num_seqs num_kv_heads max_blocks"], num_blocks: int
) -> Int[Array, "num_seqs num_kv_heads {num_blocks}"]:
    """The columns of the largest scores above -inf, in ascending order, then -1."""
    register_choice()
    out = jax.ShapeDtypeStruct((*scores.shape[:2], num_blocks), jnp.int32)
    kernel = jax.ffi.ffi_call(CHOOSE_BEST, out, vmap_method="sequential")
    integers = np.asarray([num_threads()], np.int64)
    return varying(kernel(scores, integers=integers), axes_of(scores))
