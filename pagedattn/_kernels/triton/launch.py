"""How the kernels are started: everything here follows from shapes and the spec alone."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..._dispatch.call import Call
from ..._dispatch.dequantise import Rules, is_faster_dequantised
from ..._dispatch.options import SCALES
from ...batch.draft_tree import num_words
from ...batch.metadata import Sequences, nondecreasing_starts
from ...cache.packing import group_of
from . import widths
from .arguments import Config, Layout, Options, Scalars, TileShape
from .device import device_of
from .programs import Program, held, in_eight_bits, in_halves, is_short
from .tiling import Tiling
from .widths import in_four_bits, power_of_two, widths_of

DTYPES = ("float16", "bfloat16", "float32")
CACHE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8", "int4")
OLDEST = (8, 0)  # the compute capability from which Triton has products of matrices
E4M3 = (8, 9)  # the compute capability from which Triton reads float8_e4m3fn
# The options that the kernels know.
SUPPORTS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"}
    | {"cache_dtype", "token_scales", "value_dim", "sinks", "selection", "return_lse"}
    | {"batch_invariant", "parents", SCALES}
)
LOG2E = math.log2(math.e)
FEW_STEPS = 4  # whose masks cost less than a loop of their own


class Launch(NamedTuple):
    """Arguments of one kernel launch, apart from its arrays.

    Fields:
      scalars: by name, in the order of the kernel's arguments.
      constants: what the kernel is compiled for, by name.
    """

    grid: tuple[int, int, int]
    scalars: Mapping[str, int | float]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    most_registers: int | None = None  # of a thread
    contracts: bool = True  # products that are summed may be fused: the compiler chooses which


def refusals(call: Call, capability: tuple[int, int] | None) -> list[str]:
    """Why the kernels cannot run a call on a device of a compute capability (None: no GPU)."""
    reasons = [] if capability is None else _unsupported_device(call, capability)
    if call.cache_dtype not in (None, *CACHE_DTYPES):
        reasons.append(f"cache_dtype: the kernel does not read {call.cache_dtype}")
    if call.dtype not in DTYPES:
        reasons.append(f"the dtype must be one of {', '.join(DTYPES)}, got {call.dtype}")
    return reasons + widths.refusals(call)


def _unsupported_device(call: Call, capability: tuple[int, int]) -> list[str]:
    """Why the kernels cannot run a call on a device of a compute capability."""
    reasons = []
    if capability < OLDEST:
        reasons.append("it needs compute capability 8.0, this GPU has {}.{}".format(*capability))
    if call.cache_dtype == "float8_e4m3fn" and capability < E4M3:
        reasons.append(f"cache_dtype {call.cache_dtype} needs compute capability 8.9")
    device = device_of(0, capability)
    least = held(Program(rows=16, keys=16, num_warps=4, num_stages=2), call, device)
    if least > device.shared_bytes:
        reasons.append(
            f"keys and values of {call.head_dim} and {call.out_dim} columns in {call.dtype} need "
            f"{least} bytes of shared memory, the device has {device.shared_bytes}"
        )
    return reasons


def is_dequantised(call: Call, rules: Rules) -> bool:
    """Whether a call's cache is dequantised before the kernels read it.

    Only those with per-token scales, which take twice as long to read as others. Not with a
    selection, since blocks that are not chosen would be filled too, nor with `batch_invariant`,
    since the choice follows from the size of the batch, and rounding from the choice.
    """
    allowed = call.token_scales and call.selection is None and not call.batch_invariant
    return allowed and is_faster_dequantised(call, rules)


def starts_in_order(call: Call, batch: Sequences) -> Sequences:
    """The batch; with starts that never fall, where tiles find their sequence by searching them.

    Where each sequence is given tiles, the kernel itself takes padding with 0 for the end, and
    nothing need run before it.
    """
    return batch if is_short(call) else nondecreasing_starts(batch)


def attention_launch(call: Call, tiles: Tiling, table_stride: int) -> Launch:
    """The launch of `attention_kernel`; `table_stride` is that of the rows of the block tables."""
    table_stride = table_stride if call.selection is None else call.num_listed
    unit = _stride_unit(call)
    constants = {"config": _config(call, tiles, unit)}
    scalars = _scalars(call, tiles, table_stride, unit)._asdict()
    programs = tiles.num_tiles * tiles.head_tiles * call.num_kv_heads // max(1, tiles.kv_heads)
    grid = (programs, tiles.splits, 1)
    program = tiles.program
    # Three programs share a multiprocessor, as without segments, whose state takes registers.
    three = tiles.segment > 0 and program.rows == 16 and program.num_warps == 4
    most = 168 if three and call.itemsize <= 2 else None
    started = Launch(grid, scalars, constants, program.num_warps, program.num_stages, most)
    # Programs of other rows, and loops with masks and without, would be fused differently.
    return started._replace(contracts=not call.batch_invariant)


def parts_of(call: Call, tiles: Tiling) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the partial results of split keys, float32."""
    rows = 2 * tiles.parts if tiles.segment > 0 else tiles.parts
    return (tiles.parts, *call.out_shape), (rows, *call.lse_shape)


def _join_launch(call: Call, tiles: Tiling) -> Launch:
    """The launch of `join_kernel`."""
    num_rows = call.num_tokens * call.num_heads
    constants = {
        "HEAD_DIM": call.out_dim,
        "DIMS": power_of_two(call.out_dim),
        "ALIBI": call.spec.alibi_slopes is not None,
        "PARTS": tiles.segment // tiles.part,
        "MOST": power_of_two(tiles.parts),
        "HEADS": call.num_heads,
        "GROUP": call.group,
        "BY_HEADS": scaled_by_heads(call),
    }
    scalars = {"num_rows": num_rows, "num_parts": tiles.parts, "value_scale_stride": -1}
    return Launch((num_rows, 1, 1), scalars, constants, 1, 3, contracts=False)


def merge_launch(call: Call, tiles: Tiling) -> Launch:
    """The launch of `merge_kernel`, or of `join_kernel` for segments."""
    if tiles.segment > 0:
        return _join_launch(call, tiles)
    num_rows = call.num_tokens * call.num_heads
    constants = {
        "HEAD_DIM": call.out_dim,
        "DIMS": power_of_two(call.out_dim),
        "SPLITS": power_of_two(tiles.splits),
        # With few splits, reading empty parts too costs less than waiting for the log-sum-exps.
        "EAGER": tiles.splits <= 8,
    }
    scalars = {"num_rows": num_rows, "num_splits": tiles.splits}
    num_warps = 1 if tiles.splits <= 8 else 4 if tiles.splits <= 32 else 8
    return Launch((num_rows, 1, 1), scalars, constants, num_warps, 1)


def _array_strides(call: Call) -> tuple[int, ...]:
    """Of the query's tokens and heads; of the keys' blocks, slots and heads; of the values'."""
    key = call.strides.key[:3]
    return (*call.strides.query[:2], *key, *(call.strides.value[:3] or key))


def _stride_unit(call: Call) -> int:
    return math.gcd(16, *_array_strides(call))


def _scalars(call: Call, tiles: Tiling, table_stride: int, unit: int) -> Scalars:
    """The numbers of a launch; KV heads that one program computes count as one."""
    scale, cap = _scale_and_cap(call)
    together = max(1, tiles.kv_heads)
    scalars = Scalars(
        abs(scale),
        cap,
        call.window or 0,
        call.num_tokens,
        call.num_seqs,
        call.num_kv_heads,
        call.num_blocks,
        call.max_blocks,
        table_stride,
        *(stride // unit for stride in _array_strides(call)),
    )
    return scalars._replace(
        num_kv_heads=call.num_kv_heads // together,
        head_stride=scalars.head_stride * together,
        value_head_stride=scalars.value_head_stride * together,
    )


def _config(call: Call, tiles: Tiling, unit: int) -> Config:
    layout = _layout(call, unit)
    tile, few = _tile_shapes(call, tiles, layout.pairs)
    return Config(
        widths=widths_of(call),
        layout=layout,
        options=_options(call),
        tile=tile,
        few=few,
        group=call.group * max(1, tiles.kv_heads),
        kv_heads=tiles.kv_heads,
        keys=tiles.program.keys,
        tiles_a_seq=tiles.tiles_a_seq,
        own_padding=tiles.own_padding,
        split=tiles.splits > 1,
        min_steps=tiles.min_steps,
        segment=tiles.segment,
        part=tiles.part,
    )


def _layout(call: Call, unit: int) -> Layout:
    key = call.strides.key[:3]
    value = call.strides.value[:3] or key
    four = in_four_bits(call)
    pairs = four or (in_eight_bits(call) and unit % 2 == 0)
    small = pairs and call.num_blocks * max(key[0], value[0]) < 1 << 31
    return Layout(
        call.block_size,
        unit,
        alike=value == key,
        small=small,
        pairs=pairs,
        nibbles=four,
        sums=4 if four else 2 if pairs else 1,
        halves=in_halves(call) and (pairs or widths_of(call).latent),
        scaled=call.token_scales and not four,
        by_heads=scaled_by_heads(call),
        key_groups=call.head_dim // group_of(call.head_dim) if four else 0,
        value_groups=call.out_dim // group_of(call.out_dim) if four else 0,
    )


def scaled_by_heads(call: Call) -> bool:
    """Whether a cache of fewer bits has per-head scales, or none."""
    return call.cache_dtype is not None and not call.token_scales


def with_strides(launch: Launch, call: Call, **scales) -> Launch:
    """The launch with the strides of a layer's per-head scales, -1 for None.

    Layers share the plan that it comes from, and their scales may be of different kinds.
    """
    if not scaled_by_heads(call):
        return launch
    strides = {
        f"{name}_stride": -1 if scale is None else scale.ndim for name, scale in scales.items()
    }
    return launch._replace(scalars={**launch.scalars, **strides})


def _options(call: Call) -> Options:
    spec, selects = call.spec, call.selection is not None
    return Options(
        causal=spec.causal,
        window=call.window is not None,
        soft_cap=spec.logits_soft_cap is not None,
        alibi=spec.alibi_slopes is not None,
        sinks=call.sinks,
        negate=call.scale < 0,
        selection=selects,
        looked_up=selects and (call.window is not None or spec.alibi_slopes is not None),
        words=num_words(call.max_query_len) if call.parents else 0,
    )


def _tile_shapes(call: Call, tiles: Tiling, pairs: bool) -> tuple[TileShape, TileShape | None]:
    """Of all tiles; of those with few tokens, if they compute fewer rows."""
    rows, _, num_warps, _ = tiles.program
    # More warps than the rows need, at 16 rows a warp: they share the keys of a step. Only for
    # Hopper's matrix products, which take 64 rows at least.
    apart = 64 <= rows < 16 * num_warps
    # A second loop, without masks, pays where arithmetic takes the time, in some steps.
    steps = call.max_keys // (tiles.splits * tiles.program.keys)
    unmasked = call.window is None and (not is_short(call) or (pairs and steps > FEW_STEPS))
    if tiles.segment > 0:
        unmasked = unmasked and not pairs and same_without_masks(call)
    tile = TileShape(tiles.heads, tiles.tokens, rows, apart, unmasked)
    if is_short(call) or tiles.segment > 0 or not tiles.heads <= 16 < rows:
        return tile, None
    return tile, TileShape(tiles.heads, 16 // tiles.heads, 16, apart=False, unmasked=False)


def same_without_masks(call: Call) -> bool:
    """Whether `weigh_leaf` gives the same bits without masks, by fused operations."""
    spec = call.spec
    return spec.logits_soft_cap is None and spec.alibi_slopes is None and not call.token_scales


def _scale_and_cap(call: Call) -> tuple[float, float]:
    """The kernel's scale and cap, as `Formula` in online_softmax.py describes them."""
    scale, cap = call.scale, call.spec.logits_soft_cap
    unit = 1.0 if call.spec.alibi_slopes is not None else LOG2E
    if cap is None:
        return scale * unit, 0.0
    return scale / cap, cap * unit
