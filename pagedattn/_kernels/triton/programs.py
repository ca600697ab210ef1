"""How much one program computes at a time: rules that were measured, and what a device can hold.

The figures in the rules were measured on an H200 with 132 multiprocessors, in bfloat16; those of
few keys in eight bits on an H100 with as many.
"""

from typing import NamedTuple

from ..._dispatch.call import Call
from .device import Device
from .widths import in_four_bits, is_wide, power_of_two, widths_of

# Up to this query length each sequence gets a fixed number of tiles; beyond, tiles search theirs.
SHORT_QUERY = 16
BARRIERS = 2048  # bytes of shared memory at most; and what little else there is


class Program(NamedTuple):
    """The rows and keys that one program computes at a time, and its warps and pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


# Of int4_decode.py: warps on a multiprocessor, which has registers for as many, and fewer keys for
# each of them than which `short_program` is faster.
INT4_DECODE_WARPS, INT4_DECODE_KEYS = 8, 48
LONE_WARP = Program(16, keys=32, num_warps=1, num_stages=5)


def is_short(call: Call) -> bool:
    """Whether each sequence gets a fixed number of tiles."""
    return call.longest_query <= SHORT_QUERY


def in_halves(call: Call) -> bool:
    """Whether products are of float16: fewer bits become that in fewer steps than bfloat16."""
    few = call.cache_dtype is not None and call.dtype != "float32"
    return few and (widths_of(call).latent or not is_wide(call))


def in_eight_bits(call: Call) -> bool:
    """Whether eight_bits.py can read the cache: values are pairs of columns, products float16."""
    return in_halves(call) and not widths_of(call).latent and call.out_dim % 2 == 0


def has_narrow_sums(call: Call, device: Device) -> bool:
    """Whether wgmma would sum up values in narrow tiles: those have 32 rows, which take mma.

    ptxas 12.8, of Triton 3.6, adds to another register than that of the last tile's address: of
    int8 of 64 columns the odd ones were wrong on an H200, and some addresses illegal. The listing
    of 12.9 has the right register; it has not run.
    """
    if device.products != "wgmma" or not in_eight_bits(call):
        return False
    return in_four_bits(call) or widths_of(call).value_dims < 128


def short_program(call: Call, programs: int, rows: int, device: Device):
    """The program, the most splits of the keys, and the fewest keys of a split.

    `programs` is their number without splits. If these fill the device, splits serve only to even
    out sequences of different lengths; they are long then, since each one costs writing a partial
    result and reading it in the merge.
    """
    num_sms = device.num_sms
    crowd = _crowd(call, programs, rows, num_sms)
    lone = _of_lone_warps(call, programs, rows, num_sms)
    # Three programs of four warps share a multiprocessor, or two of 32 rows.
    one_wave = (3 if rows <= 16 else 2) * num_sms // programs
    if lone and not (crowd.crowded and call.max_keys > 4096):
        splits, min_keys, program = 8 * num_sms // programs, 128, LONE_WARP
    elif crowd.whole:
        splits, min_keys, program = 1, 64, _whole_program(call, crowd, rows)
    elif crowd.crowded or crowd.uneven:
        # Many splits may get no keys: a thousand empty programs cost about a microsecond. Sequences
        # of 4096 tokens are cut in three: then 512 or 256 programs fill whole waves.
        splits, min_keys = 64 * num_sms // programs, 88 * rows
        program = LONE_WARP if lone else Program(rows, keys=128, num_warps=4, num_stages=3)
    elif call.max_keys >= 256 * one_wave:
        splits, min_keys = one_wave, 128
        program = Program(rows, keys=128, num_warps=4, num_stages=4 if in_eight_bits(call) else 3)
        if splits == 1 and not in_eight_bits(call):
            # Two on each multiprocessor: smaller steps, of which more are under way.
            program = program._replace(keys=64, num_stages=5)
    elif call.block_size % 128 == 0 and not in_eight_bits(call):
        splits, min_keys, program = _one_step(call, programs, rows, num_sms)
    else:
        # So few keys that most of the time goes into starting the programs: as many as fit into one
        # wave, which is four a multiprocessor.
        splits, min_keys, program = 4 * num_sms // programs, 64, Program(rows, 32, 4, num_stages=3)
        if in_eight_bits(call):
            # All keys of a split in one step, if each has a multiprocessor of its own. Three stages
            # in place of two take a third longer.
            keys = 128 if call.max_keys * programs <= 128 * num_sms else 64
            min_keys, program = keys, Program(rows, keys, num_warps=4, num_stages=2)
    return _in_registers(program, call), splits, min_keys


def _of_lone_warps(call: Call, programs: int, rows: int, num_sms: int) -> bool:
    """Whether programs are `LONE_WARP`, which reads integers with per-token scales fastest.

    These take longer to multiply than to load. Eight warps on a multiprocessor have registers for
    that, and do so without barriers, if there are keys for all of them.
    """
    integers = in_halves(call) and call.token_scales and call.cache_dtype in ("int4", "int8")
    return integers and rows <= 16 and programs * call.max_keys >= 8 * 128 * num_sms


def takes_int4_decode(call: Call, device: Device) -> bool:
    """Whether int4_decode.py computes a call: decodes of bfloat16 with keys for all its warps."""
    columns = call.head_dim == call.out_dim == 128
    side_by_side = all(strides[2] == call.head_dim // 2 for strides in call.strides[1:] if strides)
    spec = call.spec
    plain = spec.alibi_slopes is None and call.selection is None and not call.batch_invariant
    tiled = in_four_bits(call) and columns and side_by_side and call.group <= 8
    programs = call.num_seqs * call.num_kv_heads // int4_decode_heads(call)
    enough = programs * call.max_keys >= INT4_DECODE_KEYS * INT4_DECODE_WARPS * device.num_sms
    decodes = call.dtype == "bfloat16" and call.longest_query == 1 and not call.parents
    return decodes and tiled and plain and enough and programs > 0


def int4_decode_heads(call: Call) -> int:
    """KV heads of a program by int4_decode.py: it has registers for 16 columns of products."""
    return 2 if call.group <= 4 and call.num_kv_heads % 2 == 0 else 1


def int4_decode_program(call: Call, programs: int, device: Device) -> tuple[Program, int, int]:
    """As `short_program`, for int4_decode.py."""
    columns = 8 if call.group <= 4 else 16
    splits = max(1, INT4_DECODE_WARPS * device.num_sms // programs)
    return LONE_WARP._replace(rows=columns), splits, 128


def _one_step(call: Call, programs: int, rows: int, num_sms: int) -> tuple[int, int, Program]:
    """Splits of few keys that lie in one block: all of them at once, after one look-up."""
    few = call.max_keys * programs <= 64 * 4 * num_sms
    keys, shared = (64, 4) if few else (128, 3)  # so many programs share a multiprocessor
    return shared * num_sms // programs, keys, Program(rows, keys, num_warps=4, num_stages=2)


class Crowd(NamedTuple):
    """What the number of programs, one a sequence and KV head, means for a device."""

    crowded: bool  # several for each multiprocessor
    many: bool  # so many that it matters little which of them end last
    uneven: bool  # fewer: if their lengths differ, a part of the device waits for the longest
    whole: bool  # the keys of a sequence are not split


def _crowd(call: Call, programs: int, rows: int, num_sms: int) -> Crowd:
    """`many` and `uneven` were measured for small tiles on caches in the query's dtype alone."""
    crowded = programs >= 2 * num_sms
    measured = rows <= 16 and not in_eight_bits(call)
    many = measured and programs >= 5 * num_sms
    some = measured and 3 * num_sms < 2 * programs and not many
    uneven = some and call.max_keys > 2048
    nearly_a_wave = 3 * num_sms <= 4 * programs <= 4 * num_sms
    whole = call.max_keys <= 4096 and (crowded or nearly_a_wave) and not uneven
    return Crowd(crowded, many, uneven, whole)


def _whole_program(call: Call, crowd: Crowd, rows: int) -> Program:
    """Small programs side by side; or, if few, one on each multiprocessor with more stages."""
    if crowd.many or call.head_dim <= 64 or not crowd.crowded:
        sizes = {"keys": 128, "num_warps": 4}
    else:
        sizes = {"keys": 64, "num_warps": 2}
    # What takes half the memory has room for more stages.
    stages = 5 if in_eight_bits(call) or not crowd.crowded else 3
    return Program(rows, **sizes, num_stages=stages)


def _in_registers(program: Program, call: Call) -> Program:
    """The program with fewer keys a step, where rows or head_dim leave fewer registers for them."""
    if program.rows > 32:
        program = program._replace(keys=min(program.keys, 64), num_warps=4, num_stages=3)
    keys = program.keys // 2 if call.head_dim > 128 else program.keys
    return program._replace(keys=max(16, keys))


def long_program(call: Call, programs: int, rows: int, device: Device):
    """As `short_program`; arithmetic takes the time here, so splits only fill the device.

    Where they do, two programs a multiprocessor hide each other's latencies.
    """
    # Of 128 columns four warps spill; with wgmma they do so too, but are what was measured.
    # Scales of tokens take registers too.
    crowded = call.token_scales or call.head_dim > (128 if device.products == "wgmma" else 64)
    warps = 8 if rows > 128 or (crowded and rows > 64) else 4
    splits = 2 * device.num_sms // programs if 2 * programs <= device.num_sms else 1
    return Program(rows, 64, warps, 3), splits, 512


def wide_program(call: Call, programs: int, rows: int, device: Device):
    """As `short_program`, for keys and values that fill shared memory and the registers."""
    num_sms = device.num_sms
    if rows < 64:
        return Program(rows, keys=32, num_warps=4, num_stages=3), 2 * num_sms // programs, 256
    # Eight warps share what is summed, 64 rows of 512 columns; one program a multiprocessor.
    keys, num_stages = (64, 2) if widths_of(call).latent else (32, 3)
    return Program(rows, keys, 8, num_stages), num_sms // programs, 256


def invariant_rows(call: Call, device: Device) -> int:
    """Rows of a tile: as many as are there, of those whose products have the same bits.

    Registers hold three sums for each: of a step, of a segment, and of those before it.
    """
    if call.itemsize > 2:
        return 16
    most = 32 if columns_of(call) > 128 else 64 if is_short(call) else 128
    if has_narrow_sums(call, device):
        return max(16, min(32, power_of_two(call.group * call.longest_query)))
    # Blackwell's products of 64 rows and more may have other bits than those of few; Hopper's have,
    # of keys that were loaded as bytes.
    least = min(64, most) if device.products == "tcgen05" or in_halves(call) else 16
    return max(least, min(most, power_of_two(call.group * call.longest_query)))


def invariant_program(rows: int, call: Call, device: Device) -> Program:
    """The program of so many rows; all take as many keys at a time as the largest one can.

    Of 128 keys, products fill the registers where it is not Hopper's that read their operands from
    shared memory.
    """
    largest = Program(128, 128 if device.products == "wgmma" else 64, 8, 3)
    if columns_of(call) > 128:
        largest = Program(32, 32, 8, 2 if is_wide(call) else 3)
    program = fitting(largest, call, device)
    return program._replace(rows=rows, num_warps=8 if rows > 64 or is_wide(call) else 4)


def columns_of(call: Call) -> int:
    return max(call.head_dim, call.out_dim)


def fitting(program: Program, call: Call, device: Device) -> Program:
    """The program with fewer keys a step, then fewer stages, if it would not fit shared memory."""
    if call.itemsize > 2:
        # No tensor cores: threads hold what they multiply, in 32 bits.
        keys = 16 if call.head_dim > 128 else 32
        num_warps = 8 if program.rows > 16 and call.head_dim > 64 else 4
        program = Program(program.rows, keys, num_warps, num_stages=2)
    while program.keys > 16 and held(program, call, device) > device.shared_bytes:
        program = program._replace(keys=program.keys // 2)
    while program.num_stages > 2 and held(program, call, device) > device.shared_bytes:
        program = program._replace(num_stages=program.num_stages - 1)
    return program


def held(program: Program, call: Call, device: Device) -> int:
    """Bytes of shared memory that a program takes at most."""
    rows, keys, _, num_stages = program
    columns = widths_of(call)
    from_memory = device.products != "mma" and rows >= 64
    # Not every stage holds keys: one looks up their blocks, and with short queries one more is
    # the step being computed, if products take it from registers.
    computed = is_short(call) and not is_wide(call) and not from_memory
    loaded = max(1, num_stages - (2 if computed else 1)) * columns.loaded
    if from_memory and columns.latent:
        loaded += columns.value_dims  # laid out anew as values
    if from_memory and columns.latent and device.products == "tcgen05":
        loaded += columns.query  # and as keys
    # Weights of few rows go through memory from one product to the next.
    weights = 2 * keys if rows <= 64 else 0
    lines = 8 * keys if call.parents else 0  # where their keys stand
    return (keys * loaded + rows * (columns.query + weights)) * call.itemsize + lines + BARRIERS
