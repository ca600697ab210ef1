"""Scores of blocks and the choice of the best on a GPU, one kernel each."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..._arrays.namespace import cdiv
from ..._kernels.triton.launch import DTYPES, E4M3
from ..._kernels.triton.selection import choice_kernel, scores_kernel
from ..._kernels.triton.widths import power_of_two, tile_width
from ..triton_call import triton_call
from . import capability

__all__ = ["MOST_COLUMNS", "best", "scores", "takes"]

TILES = {2: 64, 4: 16}  # blocks of a program, by the bytes of a number: float32 fills the registers
MOST_ROWS = 64  # of queries at a time
MOST_COLUMNS = 1 << 16  # a program holds all scores of a row


def takes(query: str, summaries: str) -> bool:
    """Whether the kernel reads queries and summaries of two dtypes on these GPUs."""
    few = summaries == "float8_e4m3fn" and capability() >= E4M3
    return query in DTYPES and (summaries == query or few)


def scores(
    parts: Sequence[Float[Array, "num_seqs rows num_kv_heads head_dim"]],
    num_rows: Int[Array, "num_seqs"],
    planes: Sequence[Float[Array, "num_blocks num_kv_heads head_dim"]],
    blocks: Int[Array, "num_seqs max_blocks"],
) -> Float[Array, "num_seqs num_kv_heads max_blocks"]:
    """The sum over the planes of their products with a sequence's rows, and of these the greatest.

    Of queries and summaries that it `takes`.
    """
    queries = jnp.stack(parts)
    num_seqs, rows, kv_heads, head_dim = parts[0].shape
    columns = blocks.shape[1]
    sizes = num_seqs, rows, kv_heads, head_dim, columns, len(planes), queries.dtype.itemsize
    constants = constants_of(*sizes)
    (found,) = triton_call(
        scores_kernel,
        *(queries, num_rows.astype(jnp.int32), planes[0], planes[-1], blocks),
        outs=[jax.ShapeDtypeStruct((num_seqs, kv_heads, columns), jnp.float32)],
        grid=(num_seqs * kv_heads, cdiv(columns, constants["TILE"]), 1),
        num_warps=4,
        num_stages=1,
        **constants,
    )
    return found


def constants_of(num_seqs, rows, kv_heads, head_dim, columns, planes, itemsize) -> dict[str, int]:
    """What `scores_kernel` is compiled for."""
    return {
        "NUM_SEQS": num_seqs,
        "ROWS": rows,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "COLUMNS": columns,
        "PLANES": planes,
        "DIMS": tile_width(head_dim),
        "TILE": TILES[itemsize],
        "ROWS_AT_ONCE": min(MOST_ROWS, tile_width(rows)),
    }


def best(
    scores: Float[Array, "num_seqs num_kv_heads max_blocks"], num_blocks: int
) -> Int[Array, "num_seqs num_kv_heads {num_blocks}"]:
    """The columns of the largest scores above -inf, in ascending order, then -1.

    Of at most MOST_COLUMNS.
    """
    num_seqs, kv_heads, columns = scores.shape
    width = power_of_two(columns)
    (chosen,) = triton_call(
        choice_kernel,
        scores,
        outs=[jax.ShapeDtypeStruct((num_seqs, kv_heads, num_blocks), jnp.int32)],
        grid=(num_seqs * kv_heads, 1, 1),
        num_warps=min(16, max(4, width // 1024)),
        num_stages=1,
        COLUMNS=columns,
        CHOSEN=num_blocks,
        WIDTH=width,
        PLACES=power_of_two(num_blocks),
    )
    return chosen
