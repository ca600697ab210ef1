"""The structs that threads share: the arguments of a call, and an item of its work.

A processor adds to a counter at once only where it lies in one cache line: elsewhere ARM ends the
process (SIGBUS), and Linux puts a thread to sleep for 10 ms at each access on Intel CPUs that
detect it. So each counter has `APART` bytes of its own, and structs are multiples of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import from_dtype, types

from .compiling import intrinsic

ADDRESSES = (
    *("query", "key", "value", "tables", "seq_lens", "starts", "slopes"),
    "bias",  # float32; 0 if there is none
    *("depths", "ancestors"),  # of a `DraftTree`; 0 if there is none
    *("key_scale", "value_scale"),  # float32 of the KV heads, or one number; 0 if there is none
    "selection",  # int32 [num_seqs, num_kv_heads, num_selected], ascending, then -1; 0: all blocks
    *("key_scales", "value_scales"),  # those of tokens; 0 if there are none
    "prefill",  # machine code that computes an item of a long sequence; 0 if there are none
    *("out", "lse"),
)
SIZES = (
    *("num_tokens", "num_kv_heads", "group", "head_dim", "value_dim", "num_blocks", "block_size"),
    *("num_seqs", "max_blocks"),
    "itemsize",  # of query and out
    "cache_itemsize",
    "bias_columns",
    "num_selected",
    "num_planes",  # of summaries of blocks
    "value_columns",  # of the plane that holds the values
    "words",  # of a token's ancestors
)
STRIDES = (  # in bytes
    *("query_token", "query_head", "key_block", "key_slot", "key_head"),
    *("value_block", "value_slot", "value_head", "table_row", "bias_token", "bias_head"),
    *("key_scale_head", "value_scale_head"),
)
OPTIONS = (
    "causal",
    "window",  # NO_WINDOW if there is none
    "longest",  # sequences with more queries are long: by `prefill`; 0: all, in segments of keys
    "threads",  # that may work on it
    "most_heads",  # KV heads of an item of `prefill` with few rows
)
SCHEDULE = (
    "num_items",
    "first_item",  # the address of the first work item
    "partials",  # the address of the counters and states of sequences in several work items
    "state_bytes",  # of one of these states
    "row_bytes",  # of a row of float32, of a query or of sums
    "rows",  # the most of a state
    "tile_tokens",  # the most of an item of a long sequence,
    "tile_heads",  # and the most KV heads of one with few rows
    "by_segments",  # whether an item of a long sequence has the keys of one segment
)
COUNTERS = (  # to which several threads add
    "users",  # who may still look at this struct: the last one frees it
    "claimed",  # work items that somebody has begun
    "done",  # work items that are finished
)
NUMBERS = (
    "scale",
    "soft_cap",  # 0 if there is none
    "unit",  # a factor on the values
)
# Bytes that what threads write lies apart: a cache line of Apple's CPUs, and two of others', of
# which Intel's fetch pairs.
APART = 128


def struct(fields: Sequence[tuple[str, str]], counters: Sequence[str] = ()) -> np.dtype:
    """Fields side by side, then counters; all of it as long as a multiple of APART."""
    packed: Any = np.dtype(list(fields))
    offsets = [packed.fields[name][1] for name, _ in fields]
    begin = -(-packed.itemsize // APART) * APART
    offsets += [begin + APART * number for number in range(len(counters))]
    formats = [kind for _, kind in fields] + ["i8"] * len(counters)
    names, size = [name for name, _ in fields] + [*counters], begin + APART * len(counters)
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": size})


INTEGERS = (*ADDRESSES, *SIZES, *STRIDES, *OPTIONS, *SCHEDULE)
CALL_ARGS = struct(
    [(name, "i8") for name in INTEGERS] + [(name, "f4") for name in NUMBERS], counters=COUNTERS
)
WORK_ITEM_FIELDS = (
    "seq",
    "token",  # its first one
    "num_queries",
    "position",  # of its first token, or, where drafts branch, of that one's slot
    "context",  # the keys before those of its sequence's new tokens
    "kv_head",  # its first one
    "num_heads",  # how many of them
    "is_tile",  # of a long sequence, which `prefill` computes
    "seq_len",
    "first",  # its first key; of a selection keys are counted in the list of its blocks
    "last",  # the key after its last one
    "part",  # its number among the work items of its sequence
    "parts",
    # Those of a sequence in several work items; 0 if there is one.
    "state",  # the address of its part's state
    "finished",  # the address of the counter of finished parts
)
WORK_ITEM = struct([(name, "i8") for name in WORK_ITEM_FIELDS])
NO_WINDOW = 1 << 40

call_args_type, work_item_type = from_dtype(CALL_ARGS), from_dtype(WORK_ITEM)


def record_at(kind):
    @intrinsic
    def record(typing, address):
        """The struct at an address; its fields are read and written there."""

        def code(context, builder, signature, args):
            return builder.inttoptr(args[0], context.get_value_type(kind))

        return kind(types.intp), code

    return record


args_at, work_item_at = record_at(call_args_type), record_at(work_item_type)


def offset(name: str, struct: Any = CALL_ARGS) -> int:
    """Where a field of a struct lies."""
    return struct.fields[name][1]
