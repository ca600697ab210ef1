"""How the kernels are started: everything here follows from shapes and the spec alone.

The figures in the rules were measured on an H200 with 132 multiprocessors, in bfloat16.
"""

import math
from typing import Any, NamedTuple

DTYPES = ("float16", "bfloat16", "float32")
MAX_HEAD_DIM = 256
# Query lengths up to here get a fixed number of tiles a sequence; longer ones are searched for.
SHORT_QUERY = 16
MAX_SPLITS = 128  # the merge holds them all at once
# Shared memory that one program can have, by compute capability; 99 elsewhere.
SHARED_KILOBYTES = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
LOG2E = math.log2(math.e)


class Shape(NamedTuple):
    """What a launch depends on, of either framework's arrays."""

    num_tokens: int
    num_heads: int
    num_seqs: int
    max_blocks: int
    max_query_len: int
    max_keys: int  # that a token may see
    block_size: int
    num_kv_heads: int
    head_dim: int
    itemsize: int

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def short(self) -> bool:
        return self.max_query_len <= SHORT_QUERY


class Device(NamedTuple):
    """What a launch depends on, of the device."""

    num_sms: int
    shared_bytes: int


class Program(NamedTuple):
    """What one program computes at a time, and with what."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Tiling(NamedTuple):
    """How the rows and keys of a call are cut up among programs."""

    program: Program
    heads: int  # query heads of a tile
    head_tiles: int  # tiles that the heads of a group take
    tokens: int  # tokens of a tile
    tiles_a_seq: int  # 0: tiles find their sequence by search
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


def refusals(query, cache) -> list[str]:
    """Why the kernels cannot run on arrays like these, whatever the framework."""
    reasons = []
    if str(query.dtype).removeprefix("torch.") not in DTYPES:
        reasons.append(f"the dtype must be one of {', '.join(DTYPES)}, got {query.dtype}")
    if cache.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim must be at most {MAX_HEAD_DIM}, got {cache.head_dim}")
    return reasons


def shape_of(query, cache, batch, spec) -> Shape:
    """The shapes of a call's arrays."""
    max_keys = batch.max_blocks * cache.block_size
    if spec.sliding_window is not None:
        span = spec.sliding_window * (1 if spec.causal else 2) + batch.max_query_len
        max_keys = min(max_keys, span)
    return Shape(
        num_tokens=query.shape[0],
        num_heads=query.shape[1],
        num_seqs=batch.num_seqs,
        max_blocks=batch.max_blocks,
        max_query_len=max(1, batch.max_query_len),
        max_keys=max_keys,
        block_size=cache.block_size,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        itemsize=query.dtype.itemsize,
    )


def device_of(num_sms: int, capability: tuple[int, int]) -> Device:
    """What a launch must know of a device of a CUDA compute capability."""
    kilobytes = SHARED_KILOBYTES.get(capability[0] * 10 + capability[1], 99)
    return Device(num_sms, kilobytes << 10)


def tiling(shape: Shape, device: Device) -> Tiling:
    """How a call is cut up for a device."""
    rows = tile_rows(shape)
    heads = min(shape.group, rows)
    head_tiles = -(-shape.group // heads)
    tokens = rows // heads
    if shape.short:
        tiles_a_seq = -(-shape.max_query_len // tokens)
        busy = shape.num_seqs * tiles_a_seq
        # Some more, which share the padding tokens.
        num_tiles = busy + min(8, -(-shape.num_tokens // tokens))
    else:
        tiles_a_seq, busy = 0, -(-shape.num_tokens // tokens)
        # What `find_sequence` gives: a tile is lost to each sequence at most; padding is one too.
        num_tiles = shape.num_tokens // tokens + shape.num_seqs + 1
    programs = max(1, busy * head_tiles * shape.num_kv_heads)
    choose = short_program if shape.short else long_program
    program, splits, min_keys = choose(shape, programs, rows, device.num_sms)
    program = fitting(program, shape, device.shared_bytes)
    return Tiling(
        program=program,
        heads=heads,
        head_tiles=head_tiles,
        tokens=tokens,
        tiles_a_seq=tiles_a_seq,
        num_tiles=num_tiles,
        splits=max(1, min(splits, MAX_SPLITS, -(-shape.max_keys // min_keys))),
        min_steps=max(1, min_keys // program.keys),
    )


def tile_rows(shape: Shape) -> int:
    """Rows of a tile. Rows share the keys that are loaded, but each takes its room in registers."""
    if shape.short:
        most = 64
    elif shape.num_tokens >= 1024 * shape.num_seqs and 64 < shape.head_dim <= 128:
        most = 256  # long prefills; in a mixed batch smaller tiles overlap better
    else:
        most = 128
    if shape.itemsize > 2:
        most = 32  # no tensor cores: rows gain little
    return max(16, min(most, power_of_two(shape.group * shape.max_query_len)))


def short_program(shape: Shape, programs: int, rows: int, num_sms: int):
    """What a program is, how often keys are split at most, and how many keys a split has at least.

    `programs` is what there is without splitting. Where that fills the device, splits only even out
    different lengths, and are long, since each costs a pass over its partial result.
    """
    crowded = programs >= 2 * num_sms
    one_wave = 3 * num_sms // programs  # three programs of the middle kind share a multiprocessor
    if shape.max_keys <= 4096 and (crowded or 3 * num_sms <= 4 * programs <= 4 * num_sms):
        # Small programs side by side, or one with a deep pipeline on each multiprocessor.
        plan = (64, 2, 3) if crowded else (128, 4, 5)
        if shape.head_dim <= 64:
            plan = (128, 4, plan[2])
        splits, min_keys = 1, 64
    elif crowded:
        # Most of a wide grid may be empty: that costs the device about a microsecond a thousand.
        plan, splits, min_keys = (128, 4, 3), 64 * num_sms // programs, 64 * rows
    elif shape.max_keys >= 256 * one_wave:
        plan, splits, min_keys = (128, 4, 3), one_wave, 128
    else:
        # So few keys that starting up is what takes the time.
        plan, splits, min_keys = (32, 4, 3), 6 * num_sms // programs, 64
    keys, num_warps, num_stages = plan
    if rows > 32:
        keys, num_warps, num_stages = min(keys, 64), 4, 3
    if shape.head_dim > 128:
        keys //= 2
    return Program(rows, max(16, keys), num_warps, num_stages), splits, min_keys


def long_program(shape: Shape, programs: int, rows: int, num_sms: int):
    """As `short_program`; arithmetic takes the time, so keys are split to fill the device only."""
    warps = 8 if rows > 128 or (shape.head_dim > 128 and rows > 64) else 4
    return Program(rows, 64, warps, 3), num_sms // programs, 512


def fitting(program: Program, shape: Shape, shared_bytes: int) -> Program:
    """The program with fewer keys a step, if the pipeline would not fit into shared memory."""
    if shape.itemsize > 2:
        program = program._replace(
            keys=16 if shape.head_dim > 128 else 32, num_warps=4, num_stages=2
        )
    row_bytes = power_of_two(shape.head_dim) * shape.itemsize
    # One stage looks up the blocks; for short queries another holds what is being used.
    copies = max(1, program.num_stages - (2 if shape.short else 1))
    while program.keys > 16 and _pipeline(program, copies) * row_bytes > shared_bytes:
        program = program._replace(keys=program.keys // 2)
    return program


def _pipeline(program: Program, copies: int) -> int:
    """Rows of head_dim in shared memory: keys and values of the steps under way, and queries."""
    return 2 * copies * program.keys + program.rows


def attention_launch(shape: Shape, tiles: Tiling, spec, num_blocks: int, strides) -> Launch:
    """The launch of `attention_kernel`.

    `strides`, in elements, are those of the tables (rows), the query (tokens, heads) and the cache
    (blocks, slots, heads).
    """
    table_stride, *array_strides = strides
    unit = math.gcd(16, *array_strides)
    scale, cap = _scale_and_cap(spec, shape.head_dim)
    scalars = (
        abs(scale),
        cap,
        spec.sliding_window or 0,
        shape.num_tokens,
        shape.num_seqs,
        shape.num_kv_heads,
        num_blocks,
        shape.max_blocks,
        table_stride,
        *(stride // unit for stride in array_strides),
    )
    rows, keys, num_warps, num_stages = tiles.program
    few_rows = 16 if not shape.short and tiles.heads <= 16 < rows else 0
    constants = {
        "HEAD_DIM": shape.head_dim,
        "DIMS": max(16, power_of_two(shape.head_dim)),
        "BLOCK_SIZE": shape.block_size,
        "STRIDE_UNIT": unit,
        "GROUP": shape.group,
        "HEADS": tiles.heads,
        "TOKENS": tiles.tokens,
        "ROWS": rows,
        "FEW_TOKENS": few_rows // tiles.heads,
        "FEW_ROWS": few_rows,
        "KEYS": keys,
        "TILES_A_SEQ": tiles.tiles_a_seq,
        "SPLIT": tiles.splits > 1,
        "MIN_STEPS": tiles.min_steps,
        # Worth a second loop where arithmetic is what takes the time.
        "UNMASKED": not shape.short and spec.sliding_window is None,
        "CAUSAL": spec.causal,
        "WINDOW": spec.sliding_window is not None,
        "SOFT_CAP": spec.logits_soft_cap is not None,
        "ALIBI": spec.alibi_slopes is not None,
        "NEGATE": scale < 0,
    }
    grid = (tiles.num_tiles * tiles.head_tiles * shape.num_kv_heads, tiles.splits, 1)
    return Launch(grid, scalars, constants, num_warps, num_stages)


def merge_launch(shape: Shape, tiles: Tiling) -> Launch:
    """The launch of `merge_kernel`."""
    num_rows = shape.num_tokens * shape.num_heads
    constants = {
        "HEAD_DIM": shape.head_dim,
        "DIMS": power_of_two(shape.head_dim),
        "SPLITS": power_of_two(tiles.splits),
        # Not to wait for the log-sum-exps is worth more than the few empty parts read.
        "EAGER": tiles.splits <= 8,
    }
    num_warps = 1 if tiles.splits <= 8 else 4 if tiles.splits <= 32 else 8
    return Launch((num_rows, 1, 1), (num_rows, tiles.splits), constants, num_warps, 1)


def _scale_and_cap(spec, head_dim) -> tuple[float, float]:
    """The kernel's factors: without ALiBi its logits are in units of ln 2."""
    scale, cap = spec.scale_for(head_dim), spec.logits_soft_cap
    unit = 1.0 if spec.alibi_slopes is not None else LOG2E
    if cap is None:
        return scale * unit, 0.0
    return scale / cap, cap * unit


def power_of_two(length: int) -> int:
    """The least power of two that is not below a length.

    >>> [power_of_two(n) for n in (1, 2, 3, 80, 128)]
    [1, 2, 4, 128, 128]
    """
    return 1 << max(0, length - 1).bit_length()
