"""Rows of an array set in place, inside jit."""

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped

from ..._arrays.shard_map import axes_of, varying
from .targets import SET_ROWS, register_set_rows


def set_rows(
    array: Shaped[Array, "*shape"], indices: Int[Array, "n"], rows: Shaped[Array, "n *row"]
) -> Shaped[Array, "*shape"]:
    """Sets rows: the array's memory is the result's, if the enclosing jit owns it."""
    register_set_rows()
    row = int(np.prod(rows.shape[1:]))
    facts = np.asarray([array.size // max(row, 1), row * array.dtype.itemsize], np.int64)
    out = jax.ShapeDtypeStruct(array.shape, array.dtype)
    aliases = {"input_output_aliases": {0: 0}, "vmap_method": "sequential"}
    arrays = array, indices, rows
    return varying(
        jax.ffi.ffi_call(SET_ROWS, out, **aliases)(*arrays, integers=facts), axes_of(arrays)
    )
