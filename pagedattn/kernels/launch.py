"""How the kernels are started: everything here follows from shapes and the spec alone.

The figures in the rules were measured on an H200 with 132 multiprocessors, in bfloat16.
"""

import math
from typing import Any, NamedTuple

from ..batch import Sequences, in_order
from ..call import Call
from ..ragged import cdiv
from . import widths
from .widths import power_of_two, widths_of

DTYPES = ("float16", "bfloat16", "float32")
E4M3 = (8, 9)  # the compute capability from which Triton reads float8_e4m3fn
# The options that the kernels know.
HONOURS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"}
    | {"cache_dtype", "value_dim", "sinks", "return_lse"}
)
# Up to this query length each sequence gets a fixed number of tiles; beyond, tiles search theirs.
SHORT_QUERY = 16
MAX_SPLITS = 128  # a program of the merge holds all parts of a row at once
# KiB of shared memory that one program can have, by compute capability; others have 99.
SHARED_KILOBYTES = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
ROOMY = 160 << 10  # bytes of shared memory that hold 64 of the widest queries beside their keys
LOG2E = math.log2(math.e)


class Device(NamedTuple):
    """The limits of a device that launches depend on."""

    num_sms: int
    shared_bytes: int


class Program(NamedTuple):
    """The rows and keys that one program computes at a time, and its warps and pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Tiling(NamedTuple):
    """How the rows and keys of a call are cut up among programs."""

    program: Program
    heads: int  # query heads of a tile
    head_tiles: int  # tiles that cover the heads of a group
    tokens: int  # tokens of a tile
    tiles_a_seq: int  # tiles given to each sequence; 0: tiles find their sequence by search
    num_tiles: int
    splits: int
    min_steps: int  # steps of keys below which a split is not split further


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
    least = _held(16, 1, 16, call)
    if capability is not None and least > (shared := device_of(0, capability).shared_bytes):
        reasons.append(
            f"keys and values of {call.head_dim} and {call.out_dim} columns in {call.dtype} need "
            f"{least} bytes of shared memory, the device has {shared}"
        )
    return reasons + widths.refusals(call)


def starts_in_order(call: Call, batch: Sequences) -> Sequences:
    """The batch, whose starts never fall where tiles search them.

    Tiles that are given to a sequence mend starts padded with 0 themselves: no kernel more.
    """
    return batch if is_short(call) else in_order(batch)


def device_of(num_sms: int, capability: tuple[int, int]) -> Device:
    """The limits of a device, by its number of multiprocessors and its compute capability."""
    kilobytes = SHARED_KILOBYTES.get(capability[0] * 10 + capability[1], 99)
    return Device(num_sms, kilobytes << 10)


def tiling(call: Call, device: Device) -> Tiling:
    """How a call is cut up for a device."""
    rows = tile_rows(call, device)
    heads = min(call.group, rows)
    head_tiles = cdiv(call.group, heads)
    tokens = rows // heads
    if is_short(call):
        tiles_a_seq = cdiv(call.longest_query, tokens)
        busy = call.num_seqs * tiles_a_seq
        # A few more tiles store the rows of the padding tokens.
        num_tiles = busy + min(8, cdiv(call.num_tokens, tokens))
    else:
        tiles_a_seq, busy = 0, cdiv(call.num_tokens, tokens)
        # `find_sequence` wastes at most one tile a sequence, and counts padding as a sequence.
        num_tiles = call.num_tokens // tokens + call.num_seqs + 1
    programs = max(1, busy * head_tiles * call.num_kv_heads)
    choose = wide_program if is_wide(call) else short_program if is_short(call) else long_program
    program, splits, min_keys = choose(call, programs, rows, device.num_sms)
    program = fitting(program, call, device.shared_bytes)
    return Tiling(
        program=program,
        heads=heads,
        head_tiles=head_tiles,
        tokens=tokens,
        tiles_a_seq=tiles_a_seq,
        num_tiles=num_tiles,
        splits=max(1, min(splits, MAX_SPLITS, cdiv(call.max_keys, min_keys))),
        min_steps=max(1, min_keys // program.keys),
    )


def is_short(call: Call) -> bool:
    """Whether each sequence gets a fixed number of tiles."""
    return call.longest_query <= SHORT_QUERY


def tile_rows(call: Call, device: Device) -> int:
    """Rows of a tile: more rows share each key that is loaded, but each takes registers."""
    if is_wide(call) and device.shared_bytes < ROOMY:
        most = 32
    elif is_wide(call) or is_short(call):
        most = 64
    elif call.num_tokens >= 1024 * call.num_seqs and 64 < call.head_dim <= 128:
        most = 256  # long prefills; in a mixed batch smaller tiles overlap better
    else:
        most = 128
    if call.itemsize > 2:
        most = min(32, most // 2)  # no tensor cores: rows gain little
    return max(16, min(most, power_of_two(call.group * call.longest_query)))


def short_program(call: Call, programs: int, rows: int, num_sms: int):
    """The program, the most splits of the keys, and the fewest keys of a split.

    `programs` is their number without splits. If these fill the device, splits serve only to even
    out sequences of different lengths; they are long then, since each one costs writing a partial
    result and reading it in the merge.
    """
    crowded = programs >= 2 * num_sms
    a_wave = 3 * num_sms  # three programs of four warps share a multiprocessor
    one_wave = a_wave // programs
    nearly_a_wave = a_wave <= 4 * programs <= 4 * num_sms
    if call.max_keys <= 4096 and (crowded or nearly_a_wave):
        splits, min_keys = 1, 64
        # Small programs side by side; or, if few, one on each multiprocessor with more stages.
        sizes = {"keys": 64, "num_warps": 2} if crowded else {"keys": 128, "num_warps": 4}
        if call.head_dim <= 64:
            sizes = {"keys": 128, "num_warps": 4}
        # What takes half the memory has room for more stages.
        stages = 5 if in_eight_bits(call) else 3
        program = Program(rows, **sizes, num_stages=stages if crowded else 5)
    elif crowded:
        # Many splits may get no keys: a thousand empty programs cost about a microsecond.
        splits, min_keys = 64 * num_sms // programs, 64 * rows
        program = Program(rows, keys=128, num_warps=4, num_stages=3)
    elif call.max_keys >= 256 * one_wave:
        splits, min_keys = one_wave, 128
        program = Program(rows, keys=128, num_warps=4, num_stages=4 if in_eight_bits(call) else 3)
    else:
        # So few keys that most of the time goes into starting the programs.
        splits, min_keys = 6 * num_sms // programs, 64
        program = Program(rows, keys=32, num_warps=4, num_stages=3)
    return _in_registers(program, call), splits, min_keys


def _in_registers(program: Program, call: Call) -> Program:
    """The program with fewer keys a step, where rows or head_dim leave fewer registers for them."""
    if program.rows > 32:
        program = program._replace(keys=min(program.keys, 64), num_warps=4, num_stages=3)
    keys = program.keys // 2 if call.head_dim > 128 else program.keys
    return program._replace(keys=max(16, keys))


def long_program(call: Call, programs: int, rows: int, num_sms: int):
    """As `short_program`; arithmetic takes the time here, so splits only fill the device.

    Where they do, two programs a multiprocessor hide each other's latencies.
    """
    warps = 8 if rows > 128 or (call.head_dim > 128 and rows > 64) else 4
    splits = 2 * num_sms // programs if 2 * programs <= num_sms else 1
    return Program(rows, 64, warps, 3), splits, 512


def in_eight_bits(call: Call) -> bool:
    """Whether eight_bits.py can read the cache: values are pairs of columns, products float16."""
    eight = call.cache_dtype is not None and call.dtype != "float32"
    return eight and not is_wide(call) and not widths_of(call).latent and call.out_dim % 2 == 0


def is_wide(call: Call) -> bool:
    """Whether keys or values are wider than those that the other rules were measured with."""
    return max(call.head_dim, widths_of(call).value_dims) > widths.ONE_TILE


def wide_program(call: Call, programs: int, rows: int, num_sms: int):
    """As `short_program`, for keys and values that fill shared memory and the registers."""
    if rows < 64:
        return Program(rows, keys=32, num_warps=4, num_stages=3), 2 * num_sms // programs, 256
    # Eight warps share what is summed, 64 rows of 512 columns; one program a multiprocessor.
    keys, num_stages = (64, 2) if widths_of(call).latent else (32, 3)
    return Program(rows, keys, 8, num_stages), num_sms // programs, 256


def fitting(program: Program, call: Call, shared_bytes: int) -> Program:
    """The program with fewer keys a step, if the pipeline would not fit into shared memory."""
    if call.itemsize > 2:
        program = program._replace(
            keys=16 if call.head_dim > 128 else 32, num_warps=4, num_stages=2
        )
    # Not every stage holds keys: one looks up their blocks, and with short queries one more is
    # the step being computed.
    short = is_short(call) and not is_wide(call)
    copies = max(1, program.num_stages - (2 if short else 1))
    while program.keys > 16 and _held(program.keys, copies, program.rows, call) > shared_bytes:
        program = program._replace(keys=program.keys // 2)
    return program


def _held(keys: int, copies: int, rows: int, call: Call) -> int:
    """Bytes of shared memory: keys and values of `copies` steps, and the queries of the rows."""
    columns = widths_of(call)
    return (copies * keys * columns.loaded + rows * columns.query) * call.itemsize


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
        # A warp has 16 rows; only Hopper's products, which begin at 64, are parted so.
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
