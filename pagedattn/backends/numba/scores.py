"""Scores of blocks on a CPU, whose summaries are read once by all threads, and the choice."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..._arrays.shard_map import axes_of, varying
from ..._kernels.cpu.compiled import CODES
from ..._kernels.cpu.dtypes import UNITS
from .support import num_threads
from .targets import CHOOSE_BEST, register_choice, register_scores

__all__ = ["MOST_COLUMNS", "best", "scores", "takes"]

MOST_COLUMNS = 1 << 31


def takes(query: str, summaries: str) -> bool:
    """Whether there is a kernel for queries and summaries of two dtypes, which are floating."""
    return (query, summaries) in CODES and summaries != "int8"


def scores(
    parts: Sequence[Float[Array, "num_seqs rows num_kv_heads head_dim"]],
    num_rows: Int[Array, "num_seqs"],
    planes: Sequence[Float[Array, "num_blocks num_kv_heads head_dim"]],
    blocks: Int[Array, "num_seqs max_blocks"],
) -> Float[Array, "num_seqs num_kv_heads max_blocks"]:
    """The sum over the planes of their products with a sequence's rows, and of these the greatest.

    Of queries and summaries that it `takes`.
    """
    queries, held = jnp.stack(parts), str(planes[0].dtype)
    num_seqs, max_blocks = blocks.shape
    out = jax.ShapeDtypeStruct((num_seqs, planes[0].shape[1], max_blocks), jnp.float32)
    target = register_scores(str(queries.dtype), held)
    kernel = jax.ffi.ffi_call(target, out, vmap_method="sequential")
    arrays = queries, planes[0], planes[-1], blocks, num_rows.astype(jnp.int32)
    sizes = queries.dtype.itemsize, planes[0].dtype.itemsize
    unit = int(UNITS.get(held, 1))
    integers = np.asarray([len(planes), num_threads(), *sizes, unit], np.int64)
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
