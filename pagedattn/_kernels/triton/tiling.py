"""How the rows and keys of a call are cut up among the programs of a device.

The figures of `tile_rows` were measured as those of programs.py were.
"""

from typing import NamedTuple

from ..._arrays.namespace import cdiv
from ..._dispatch.call import Call
from .device import Device
from .programs import (
    Program,
    fitting,
    has_narrow_sums,
    int4_decode_heads,
    int4_decode_program,
    invariant_program,
    invariant_rows,
    is_short,
    long_program,
    short_program,
    takes_int4_decode,
    wide_program,
)
from .widths import is_wide, power_of_two

SEGMENT = 512  # keys
MAX_STEPS = 32  # of a sequence whose steps are written one by one
MAX_SPLITS = 128  # a program of the merge holds all parts of a row at once


class Tiling(NamedTuple):
    """How the rows and keys of a call are cut up among programs."""

    program: Program
    heads: int  # query heads of a tile
    kv_heads: int  # that a program computes by int4_decode.py; else 0
    head_tiles: int  # tiles that cover the heads of a group
    tokens: int  # tokens of a tile
    tiles_a_seq: int  # tiles given to each sequence; 0: tiles find their sequence by search
    num_tiles: int
    own_padding: bool  # the sequences' tiles store the rows of padding tokens: no others do
    splits: int
    min_steps: int  # steps of keys below which a split is not split further
    segment: int  # keys whose sums are joined in order; 0 where bits may follow from the splits
    part: int  # keys of a result that is written to be joined: a segment, or one step; else 0
    parts: int  # results of a row that are written to be merged: splits, or such parts


def tiling(call: Call, device: Device) -> Tiling:
    """How a call is cut up for a device."""
    if takes_int4_decode(call, device):
        return _int4_decode_tiling(call, device)
    rows = tile_rows(call, device)
    heads = min(call.group, rows)
    head_tiles = cdiv(call.group, heads)
    tokens = rows // heads
    if is_short(call):
        tiles_a_seq = cdiv(call.longest_query, tokens)
        busy = call.num_seqs * tiles_a_seq
        num_tiles = busy
    else:
        tiles_a_seq, busy = 0, cdiv(call.num_tokens, tokens)
        # `find_sequence` wastes at most one tile a sequence, and counts padding as a sequence.
        num_tiles = call.num_tokens // tokens + call.num_seqs + 1
    programs = max(1, busy * head_tiles * call.num_kv_heads)
    choose = wide_program if is_wide(call) else short_program if is_short(call) else long_program
    program, splits, min_keys = choose(call, programs, rows, device)
    if call.batch_invariant:
        program, segment = invariant_program(rows, call, device), SEGMENT
        part = _part(call, min(splits, cdiv(call.max_keys, min_keys)), program)
    else:
        program, segment, part = fitting(program, call, device), 0, 0
    # Where each program is one warp, some that end at once would leave some schedulers with a warp
    # more than others.
    own_padding = is_short(call) and program.num_warps == 1
    if is_short(call) and not own_padding:
        num_tiles += min(8, cdiv(call.num_tokens, tokens))  # for the rows of padding tokens
    splits = min(splits, MAX_SPLITS, cdiv(call.max_keys, max(min_keys, part)))
    splits = without_empty(splits, cdiv(call.max_keys, part or program.keys))
    part = part if splits > 1 else segment
    return Tiling(
        program=program,
        heads=heads,
        kv_heads=0,
        head_tiles=head_tiles,
        tokens=tokens,
        tiles_a_seq=tiles_a_seq,
        num_tiles=num_tiles,
        own_padding=own_padding,
        splits=splits,
        min_steps=max(1, min_keys // (part or program.keys)),
        segment=segment,
        part=part,
        # The first one is the state before any key.
        parts=1 + cdiv(call.capacity, part) if splits > 1 and part else splits,
    )


def _int4_decode_tiling(call: Call, device: Device) -> Tiling:
    """As `tiling`, of decodes by int4_decode.py."""
    kv_heads = int4_decode_heads(call)
    programs = call.num_seqs * call.num_kv_heads // kv_heads
    program, splits, min_keys = int4_decode_program(call, programs, device)
    splits = min(splits, MAX_SPLITS, cdiv(call.max_keys, min_keys))
    splits = without_empty(splits, cdiv(call.max_keys, program.keys))
    return Tiling(
        program=program,
        heads=call.group * kv_heads,
        kv_heads=kv_heads,
        head_tiles=1,
        tokens=1,
        tiles_a_seq=1,
        num_tiles=call.num_seqs,
        own_padding=True,
        splits=splits,
        min_steps=max(1, min_keys // program.keys),
        segment=0,
        part=0,
        parts=splits,
    )


def without_empty(splits: int, steps: int) -> int:
    """The splits, at most so many, that get steps if each gets as many whole steps as the longest.

    >>> without_empty(33, 128)  # 4 each; the merge of 33 would be one of 64
    32
    """
    splits, steps = max(1, splits), max(1, steps)
    return cdiv(steps, cdiv(steps, splits))


def tile_rows(call: Call, device: Device) -> int:
    """Rows of a tile: more rows share each key that is loaded, but each takes registers."""
    if call.batch_invariant:
        return invariant_rows(call, device)
    if is_wide(call) and device.products == "mma":
        most = 32  # queries of more would fill the registers
    elif has_narrow_sums(call, device):
        most = 32
    elif is_wide(call) or is_short(call):
        most = 64
    elif _is_long(call) and device.products == "wgmma":
        most = 256  # in a mixed batch smaller tiles overlap better
    else:
        most = 128
    if call.itemsize > 2:
        most = min(32, most // 2)  # no tensor cores: rows gain little
    return max(16, min(most, power_of_two(call.group * call.longest_query)))


def _part(call: Call, splits: int, program: Program) -> int:
    """Keys of a result that is written where keys are split.

    Single steps let more programs share few keys, but make more to write and to join.
    """
    few = is_short(call) and splits > cdiv(call.max_keys, SEGMENT)
    return program.keys if few and call.max_keys <= MAX_STEPS * program.keys else SEGMENT


def _is_long(call: Call) -> bool:
    """Whether a call is of long prefills, and 256 rows have registers for what they sum up."""
    return call.num_tokens >= 1024 * call.num_seqs and 64 < call.head_dim <= 128
