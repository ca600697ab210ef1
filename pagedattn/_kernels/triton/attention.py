"""Paged attention in Triton: one kernel for decode, prefill, chunks and any mix.

A program computes a tile of rows for one KV head. Its rows are tokens x query heads of the group,
so that a key is loaded once for the whole group. It attends to all keys that any of its rows sees
or, where the keys are split, to its share of them. Padding tokens count as one more sequence,
without keys, whose rows are stored by tiles of its own or by all. What int4_decode.py computes for
two KV heads counts as one of them here.
"""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .arguments import Scalars
from .online_softmax import Formula
from .pages import Cache
from .states import nothing_seen
from .tile import Rows, Task, attend, store_no_parts, store_rows

# NamedTuples are made by keyword here, and their fields read by name: Triton's cache of programs
# goes by the source of functions, not by that of classes, whose fields may come in another order.


class Place(NamedTuple):
    """Which tile a program computes."""

    num_tiles: Any  # of all sequences
    seq: Any  # num_seqs for the padding
    first: Any  # token of the sequence
    kv_head: Any
    skipped_heads: Any  # query heads of the group before the tile's first one
    num_heads: Any  # of the call


@triton.jit(do_not_specialize=Scalars._fields)
def attention_kernel(
    arrays,  # arguments.py says what all these are
    scale,
    cap,
    window,
    num_tokens,
    num_seqs,
    num_kv_heads,
    num_blocks,
    max_blocks,
    table_stride,
    query_token_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    key_scale_stride,
    value_scale_stride,
    results,
    config: tl.constexpr,
):
    scalars = Scalars(
        scale=scale, cap=cap, window=window, num_tokens=num_tokens, num_seqs=num_seqs,
        num_kv_heads=num_kv_heads, num_blocks=num_blocks, max_blocks=max_blocks,
        table_stride=table_stride, query_token_stride=query_token_stride,
        query_head_stride=query_head_stride, block_stride=block_stride, slot_stride=slot_stride,
        head_stride=head_stride, value_block_stride=value_block_stride,
        value_slot_stride=value_slot_stride, value_head_stride=value_head_stride,
        key_scale_stride=key_scale_stride, value_scale_stride=value_scale_stride,
    )  # fmt: skip
    tile: tl.constexpr = config.tile
    few: tl.constexpr = config.few
    place = find_place(arrays, scalars, config)
    query_start, query_len, seq_len = lengths_of(arrays, scalars, place, config)
    rows = rows_of(arrays, results, scalars, place, query_start, config)
    task = Task(
        first=place.first,
        query_len=query_len,
        seq_len=seq_len,
        num_heads=config.group - place.skipped_heads,
        has_sinks=place.seq < num_seqs,  # padding has none
    )
    cache = cache_of(arrays, scalars, place, config)
    formula = Formula(scale=scale, cap=cap, window=window)
    if config.tiles_a_seq > 0:
        if config.own_padding:
            store_share_of_padding(arrays, results, scalars, place, config)
        elif place.seq == num_seqs:
            store_padding(rows, task, place, num_seqs, config)
            return
    if task.first >= query_len:
        return
    if few is not None:  # noqa: SIM102  (the kernel is compiled with or without it)
        if query_len - task.first <= few.tokens:
            attend(rows, cache, task, formula, config, few)
            return
    attend(rows, cache, task, formula, config, tile)


@triton.jit
def find_place(arrays, scalars, config: tl.constexpr):
    """The tile of a program. The grid is tiles x KV heads x tiles that cover a group's heads."""
    tile: tl.constexpr = config.tile
    head_tiles: tl.constexpr = (config.group + tile.heads - 1) // tile.heads
    programs_a_tile = scalars.num_kv_heads * head_tiles
    num_tiles = tl.num_programs(0) // programs_a_tile
    number = tl.program_id(0) // programs_a_tile
    kv_head = tl.program_id(0) % programs_a_tile // head_tiles
    skipped_heads = tl.program_id(0) % head_tiles * tile.heads
    num_heads = scalars.num_kv_heads * config.group
    if config.tiles_a_seq == 0:
        # The last tiles of a sequence have the most keys: started first, they do not end last.
        number = num_tiles - 1 - number
        seq = find_sequence(arrays.query_start_loc, scalars.num_seqs, number, tile.tokens)
        number -= tl.load(arrays.query_start_loc + seq) // tile.tokens + seq
    else:
        seq = tl.minimum(number // config.tiles_a_seq, scalars.num_seqs)
        number -= seq * config.tiles_a_seq
    first = tl.maximum(number * tile.tokens, 0)
    return Place(
        num_tiles=num_tiles, seq=seq, first=first, kv_head=kv_head, skipped_heads=skipped_heads,
        num_heads=num_heads,
    )  # fmt: skip


@triton.jit
def lengths_of(arrays, scalars, place, config: tl.constexpr):
    """Where a sequence's tokens begin, how many they are, and how many keys it has."""
    starts, seq, num_seqs = arrays.query_start_loc, place.seq, scalars.num_seqs
    query_start = tl.load(starts + seq)
    if config.tiles_a_seq > 0:  # noqa: SIM102  (the kernel is compiled with or without it)
        if seq == num_seqs:
            query_start = highest_start(starts, num_seqs)
    query_stop = tl.load(starts + seq + 1, mask=seq < num_seqs, other=scalars.num_tokens)
    seq_len = tl.load(arrays.seq_lens + seq, mask=seq < num_seqs, other=0)
    # Values that break the contract must not lead outside the arrays.
    query_start = tl.minimum(tl.maximum(query_start, 0), scalars.num_tokens)
    query_len = tl.minimum(tl.maximum(query_stop, 0), scalars.num_tokens) - query_start
    seq_len = tl.minimum(tl.maximum(seq_len, 0), scalars.max_blocks * config.layout.block_size)
    return query_start, query_len, seq_len


@triton.jit
def rows_of(arrays, results, scalars, place, query_start, config: tl.constexpr):
    """Pointers to a tile's first token and head."""
    unit: tl.constexpr = config.layout.stride_unit
    head = place.kv_head * config.group + place.skipped_heads
    token = (query_start + place.first).to(tl.int64)
    row = token * place.num_heads + head
    num_rows = scalars.num_tokens.to(tl.int64) * place.num_heads
    if config.segment == 0:
        row += tl.program_id(1) * num_rows
    capacity = scalars.max_blocks * config.layout.block_size
    num_parts = 1 + tl.cdiv(capacity, config.part) if config.segment > 0 else 0
    query = arrays.query + token * (scalars.query_token_stride * unit)
    return Rows(
        query=query + head.to(tl.int64) * (scalars.query_head_stride * unit),
        query_token_stride=scalars.query_token_stride,
        query_head_stride=scalars.query_head_stride,
        out=results.out + row * config.widths.value_dim,
        lse=results.lse + row,
        num_heads=place.num_heads,
        num_rows=num_rows,
        num_parts=num_parts,
        alibi_slopes=arrays.alibi_slopes + head,
        sinks=arrays.sinks + head,
        depths=arrays.depths + query_start,
        ancestors=arrays.ancestors + token * config.options.words,
    )


@triton.jit
def cache_of(arrays, scalars, place, config: tl.constexpr):
    """Pointers to a tile's KV head and sequence."""
    unit: tl.constexpr = config.layout.stride_unit
    row = place.seq.to(tl.int64)
    if config.options.selection:
        row = row * scalars.num_kv_heads + place.kv_head
    return Cache(
        key=arrays.key + place.kv_head.to(tl.int64) * (scalars.head_stride * unit),
        value=arrays.value + place.kv_head.to(tl.int64) * (scalars.value_head_stride * unit),
        key_scale=arrays.key_scale,
        value_scale=arrays.value_scale,
        key_scale_stride=scalars.key_scale_stride,
        value_scale_stride=scalars.value_scale_stride,
        kv_head=place.kv_head,
        num_kv_heads=scalars.num_kv_heads,
        table=arrays.block_tables + row * scalars.table_stride,
        num_blocks=scalars.num_blocks,
        block_stride=scalars.block_stride,
        slot_stride=scalars.slot_stride,
        value_block_stride=scalars.value_block_stride,
        value_slot_stride=scalars.value_slot_stride,
        selection=arrays.selection + row * scalars.table_stride,
        num_listed=scalars.table_stride,
    )


@triton.jit
def find_sequence(query_start_loc, num_seqs, tile, TOKENS: tl.constexpr):
    """The sequence of a tile: the last one whose tiles begin at or before it.

    Sequence s begins at tile `query_start_loc[s] // TOKENS + s`, which leaves each sequence enough
    tiles and wastes at most one; nothing but shapes is needed to launch them.
    """
    low = 0
    high = num_seqs  # the padding counts as a sequence
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def highest_start(query_start_loc, num_seqs):
    """Where the last sequence ends and the padding begins, also if the starts are padded with 0."""
    highest = tl.load(query_start_loc)
    for begin in range(0, num_seqs + 1, 128):
        at = begin + tl.arange(0, 128)
        starts = tl.load(query_start_loc + at, mask=at <= num_seqs, other=0)
        highest = tl.maximum(highest, tl.max(starts, 0))
    return highest


@triton.jit
def store_padding(rows, task, place, num_seqs, config: tl.constexpr):
    """Stores the rows of all padding tokens, in turns with the programs past the last sequence."""
    tile: tl.constexpr = config.tile
    ROWS: tl.constexpr = tile.rows
    COLUMNS: tl.constexpr = config.widths.value_dims
    stride = (place.num_tiles - num_seqs * config.tiles_a_seq) * tile.tokens
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
    for skipped in range(0, task.query_len - task.first, stride):
        if config.split and config.segment > 0:
            store_no_parts(rows, task, skipped, tile)
        else:
            store_rows(rows, task, nothing, nothing_seen(ROWS), skipped, config, tile)


@triton.jit
def store_share_of_padding(arrays, results, scalars, place, config: tl.constexpr):
    """Stores rows of padding tokens, in turns with the programs of all other tiles."""
    tile: tl.constexpr = config.tile
    ROWS: tl.constexpr = tile.rows
    COLUMNS: tl.constexpr = config.widths.value_dims
    number = place.seq * config.tiles_a_seq + place.first // tile.tokens
    padding = Place(
        num_tiles=place.num_tiles, seq=scalars.num_seqs, first=0, kv_head=place.kv_head,
        skipped_heads=place.skipped_heads, num_heads=place.num_heads,
    )  # fmt: skip
    start, length, _ = lengths_of(arrays, scalars, padding, config)
    rows = rows_of(arrays, results, scalars, padding, start, config)
    heads = config.group - place.skipped_heads
    task = Task(first=0, query_len=length, seq_len=0, num_heads=heads, has_sinks=False)
    nothing = tl.zeros([ROWS, COLUMNS], tl.float32)
    for skipped in range(number * tile.tokens, length, place.num_tiles * tile.tokens):
        store_rows(rows, task, nothing, nothing_seen(ROWS), skipped, config, tile)
