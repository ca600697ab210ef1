"""How the kernels are started: everything here follows from shapes and the spec alone."""

import math
from typing import Any, NamedTuple

from ..._dispatch.call import Call
from ...batch.metadata import Sequences, nondecreasing_starts
from . import widths
from .programs import held, in_eight_bits, is_short
from .tiling import Tiling, device_of
from .widths import power_of_two, widths_of

DTYPES = ("float16", "bfloat16", "float32")
E4M3 = (8, 9)  # the compute capability from which Triton reads float8_e4m3fn
# The options that the kernels know.
SUPPORTS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"}
    | {"cache_dtype", "value_dim", "sinks", "return_lse"}
)
LOG2E = math.log2(math.e)


class Launch(NamedTuple):
    """Arguments of one kernel launch, apart from its arrays."""

    grid: tuple[int, int, int]
    scalars: tuple[int | float, ...]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int


def refusals(call: Call, capability: tuple[int, int] | None) -> list[str]:
    """Why the kernels cannot run a call on a device of a compute capability (None: no GPU)."""
    reasons = []
    if call.cache_dtype == "float8_e4m3fn" and capability is not None and capability < E4M3:
        reasons.append(f"cache_dtype {call.cache_dtype} needs compute capability 8.9")
    if call.dtype not in DTYPES:
        reasons.append(f"the dtype must be one of {', '.join(DTYPES)}, got {call.dtype}")
    least = held(16, 1, 16, call)
    if capability is not None and least > (shared := device_of(0, capability).shared_bytes):
        reasons.append(
            f"keys and values of {call.head_dim} and {call.out_dim} columns in {call.dtype} need "
            f"{least} bytes of shared memory, the device has {shared}"
        )
    return reasons + widths.refusals(call)


def starts_in_order(call: Call, batch: Sequences) -> Sequences:
    """The batch; with starts that never fall, where tiles find their sequence by searching them.

    Where each sequence is given tiles, the kernel itself takes padding with 0 for the end, and
    nothing need run before it.
    """
    return batch if is_short(call) else nondecreasing_starts(batch)


def attention_launch(call: Call, tiles: Tiling, table_stride: int) -> Launch:
    """The launch of `attention_kernel`; `table_stride` is that of the rows of the block tables."""
    spec = call.spec
    key_strides = call.strides.key[:3]
    value_strides = call.strides.value[:3] or key_strides
    array_strides = (*call.strides.query[:2], *key_strides, *value_strides)
    unit = math.gcd(16, *array_strides)
    scale, cap = _scale_and_cap(call)
    pairs = in_eight_bits(call) and unit % 2 == 0
    scalars = (
        abs(scale),
        cap,
        call.window or 0,
        call.num_tokens,
        call.num_seqs,
        call.num_kv_heads,
        call.num_blocks,
        call.max_blocks,
        table_stride,
        *(stride // unit for stride in array_strides),
    )
    rows, keys, num_warps, num_stages = tiles.program
    few_rows = 16 if not is_short(call) and tiles.heads <= 16 < rows else 0
    columns = widths_of(call)
    constants = {
        "HEAD_DIM": call.head_dim,
        "DIMS": columns.dims,
        "REST": columns.rest,
        "VALUE_DIM": call.out_dim,
        "VALUE_DIMS": columns.value_dims,
        "LATENT": columns.latent,
        "ALIKE": value_strides == key_strides,
        "BLOCK_SIZE": call.block_size,
        "STRIDE_UNIT": unit,
        "GROUP": call.group,
        "HEADS": tiles.heads,
        "TOKENS": tiles.tokens,
        "ROWS": rows,
        "FEW_TOKENS": few_rows // tiles.heads,
        "FEW_ROWS": few_rows,
        "KEYS": keys,
        "TILES_A_SEQ": tiles.tiles_a_seq,
        "SPLIT": tiles.splits > 1,
        "MIN_STEPS": tiles.min_steps,
        # More warps than the rows need, at 16 rows a warp: they share the keys of a step. Only for
        # Hopper's matrix products, which take 64 rows at least.
        "APART": 64 <= rows < 16 * num_warps,
        # A second loop, without masks, pays where arithmetic takes the time.
        "UNMASKED": call.window is None and (pairs or not is_short(call)),
        "CAUSAL": spec.causal,
        "WINDOW": call.window is not None,
        "SOFT_CAP": spec.logits_soft_cap is not None,
        "ALIBI": spec.alibi_slopes is not None,
        "SINKS": call.sinks,
        "NEGATE": scale < 0,
        "PAIRS": pairs,
        "SMALL": pairs and call.num_blocks * max(key_strides[0], value_strides[0]) < 1 << 31,
    }
    grid = (tiles.num_tiles * tiles.head_tiles * call.num_kv_heads, tiles.splits, 1)
    return Launch(grid, scalars, constants, num_warps, num_stages)


def merge_launch(call: Call, tiles: Tiling) -> Launch:
    """The launch of `merge_kernel`."""
    num_rows = call.num_tokens * call.num_heads
    constants = {
        "HEAD_DIM": call.out_dim,
        "DIMS": power_of_two(call.out_dim),
        "SPLITS": power_of_two(tiles.splits),
        # With few splits, reading empty parts too costs less than waiting for the log-sum-exps.
        "EAGER": tiles.splits <= 8,
    }
    num_warps = 1 if tiles.splits <= 8 else 4 if tiles.splits <= 32 else 8
    return Launch((num_rows, 1, 1), (num_rows, tiles.splits), constants, num_warps, 1)


def _scale_and_cap(call: Call) -> tuple[float, float]:
    """The kernel's scale and cap; without ALiBi its logits are in base 2 (see its `walk`)."""
    scale, cap = call.scale, call.spec.logits_soft_cap
    unit = 1.0 if call.spec.alibi_slopes is not None else LOG2E
    if cap is None:
        return scale * unit, 0.0
    return scale / cap, cap * unit
