"""The structs that threads share: one call, and a piece of its work."""

from typing import Any

import numpy as np
from numba import from_dtype, types

from .compiling import intrinsic

ADDRESSES = (
    *("query", "key", "value", "tables", "seq_lens", "starts", "slopes"),
    "bias",  # float32; 0 if there is none
    *("key_scale", "value_scale"),  # float32 of the KV heads, or one number; 0 if there is none
    *("out", "lse"),
)
SIZES = (
    *("num_tokens", "num_kv_heads", "group", "head_dim", "value_dim", "num_blocks", "block_size"),
    *("num_seqs", "max_blocks"),
    "itemsize",  # of query and out
    "cache_itemsize",
    "bias_columns",
)
STRIDES = (  # in bytes
    *("query_token", "query_head", "key_block", "key_slot", "key_head"),
    *("value_block", "value_slot", "value_head", "table_row", "bias_token", "bias_head"),
    *("key_scale_head", "value_scale_head"),
)
OPTIONS = (
    "causal",
    "window",  # NO_WINDOW if there is none
    "longest",  # sequences with more queries are left to somebody else
    "threads",  # that may work on it
)
PROGRESS = (
    "users",  # who may still look at this struct: the last one frees it
    "claimed",  # pieces that somebody has begun
    "done",  # pieces that are finished
    "num_pieces",
    "pieces",  # the address of the first
    "partials",  # the address of the states of sequences in several pieces
    "state_bytes",  # of one of them
    "row_bytes",  # of a row of float32, of a query or of sums
)
NUMBERS = (
    "scale",
    "soft_cap",  # 0 if there is none
    "unit",  # a factor on the values
)
INTEGERS = (*ADDRESSES, *SIZES, *STRIDES, *OPTIONS, *PROGRESS)
JOB = np.dtype([(name, "i8") for name in INTEGERS] + [(name, "f4") for name in NUMBERS])
PIECE_FIELDS = (
    "seq",
    "token",  # its sequence's first token
    "num_queries",
    "seq_len",
    "first",  # its first key
    "last",  # the key after its last one
    "part",  # its number among the pieces of its sequence
    "parts",
    "state",  # the address of its part's state; 0 if it is alone
    "finished",  # in a sequence's first piece: how many of its pieces are
)
PIECE = np.dtype([(name, "i8") for name in PIECE_FIELDS])
NO_WINDOW = 1 << 40

job_type, piece_type = from_dtype(JOB), from_dtype(PIECE)


def _record_at(kind):
    @intrinsic
    def record(typing, address):
        """The struct at an address; its fields are read and written there."""

        def code(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.intp), code

    return record


job_at, piece_at = _record_at(job_type), _record_at(piece_type)


def offset(name: str, struct: Any = JOB) -> int:
    """Where a field of a struct lies."""
    return struct.fields[name][1]
