"""Attention of one tile: the keys that its rows see, its queries, and what is stored."""

# Constants are NamedTuples here, which the type `constexpr` does not say.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .eight_bits import factors_of, halved
from .int4_decode import attend_int4
from .lines import Lines, standing
from .lists import last_seen, most_listed, rank
from .online_softmax import Formula, Queries, Span, State, attend_keys
from .scales import head_scale
from .segments import attend_segments, store_top
from .states import columns_of, empty_state, finished, join_states, nothing_seen

LOG2E = tl.constexpr(1.4426950408889634)


class Rows(NamedTuple):
    """Memory of a tile's rows: pointers to its first token and head."""

    query: Any
    query_token_stride: Any  # in units, as the next
    query_head_stride: Any
    out: Any
    lse: Any
    num_heads: Any  # of the call, in a row of out and lse
    num_rows: Any  # of the call: tokens x heads
    num_parts: Any  # segments of a row, where they are split
    alibi_slopes: Any
    sinks: Any
    depths: Any  # from the sequence's first new token on
    ancestors: Any


class Task(NamedTuple):
    """The work of a tile."""

    first: Any  # token, counted from the sequence's first new one
    query_len: Any
    seq_len: Any
    num_heads: Any  # of the group, from the tile's first one on
    has_sinks: Any


class Places(NamedTuple):
    """The rows of a tile."""

    tokens: Any
    heads: Any
    exists: Any


@triton.jit
def attend(rows, cache, task, formula, config: tl.constexpr, tile: tl.constexpr):
    """Computes one tile: the tokens of a sequence from the first on, for a KV head's heads."""
    options: tl.constexpr = config.options
    places = places_of(task, tile)
    span = span_of(task, cache, formula.window, config, tile)
    if config.segment > 0:
        queries, formula = load_queries(rows, places, cache, span, task, formula, config, tile)
        state = first_state(rows, places, task, config, tile)
        middle = middle_of(span, task, cache, config)
        state = attend_segments(
            rows, places, span, middle, state, queries, cache, formula, config, tile
        )
        if not config.split:
            store_state(rows, cache, task, state, config, tile)
        return
    if config.split:
        nothing = span.start >= span.stop
        if options.sinks:
            nothing = nothing & (tl.program_id(1) > 0)  # the first split has the sinks
        if nothing:
            # No out is stored: the merge ignores it where the log-sum-exp is -inf.
            row = rows.lse + places.tokens * rows.num_heads + places.heads
            tl.store(row, nothing_seen(tile.rows), mask=places.exists)
            return

    if config.kv_heads > 0:
        middle = middle_of(span, task, cache, config)
        attend_int4(rows, cache, task, span, middle, formula, config, tile)
        return

    queries, formula = load_queries(rows, places, cache, span, task, formula, config, tile)
    first = first_state(rows, places, task, config, tile)
    state = empty_state(config, tile) if config.layout.scaled else first
    if tile.unmasked:
        middle = middle_of(span, task, cache, config)
        unmasked = Span(begin=span.begin, end=span.end, start=span.start, stop=middle)
        state = attend_keys(state, unmasked, queries, cache, formula, config, tile.apart, False)
        span = Span(begin=span.begin, end=span.end, start=middle, stop=span.stop)
    state = attend_keys(state, span, queries, cache, formula, config, tile.apart, True)
    if options.sinks and config.layout.scaled:
        # Not before: weights are rounded by the highest logit of scaled values.
        state = join_states(first, state, options.alibi)
    store_state(rows, cache, task, state, config, tile)


@triton.jit
def places_of(task, tile: tl.constexpr):
    """The token and head of each row of a tile, and whether they exist."""
    rows = tl.arange(0, tile.rows)
    tokens = rows // tile.heads
    heads = rows % tile.heads
    left = task.query_len - task.first
    exists = (tokens < tl.minimum(left, tile.tokens)) & (heads < task.num_heads)
    return Places(tokens=tokens, heads=heads, exists=exists)


@triton.jit
def span_of(task, cache, window, config: tl.constexpr, tile: tl.constexpr):
    """The keys that any row of a tile sees and, where they are split, this program's share."""
    options: tl.constexpr = config.options
    KEYS: tl.constexpr = config.keys
    left = task.query_len - task.first
    first_position = task.seq_len - left
    last_position = first_position + tl.minimum(left, tile.tokens) - 1
    if options.words > 0:
        first_position = task.seq_len - task.query_len  # where drafts branch, any may stand there
    begin = 0
    end = task.seq_len
    if options.causal:
        end = tl.minimum(end, last_position + 1)
    elif options.window:
        end = tl.minimum(end, last_position + window)
    if options.window:
        begin = tl.maximum(begin, first_position - window + 1)
    first = begin
    stop = end
    if options.selection:
        BLOCK_SIZE: tl.constexpr = config.layout.block_size
        most = most_listed(cache, end, BLOCK_SIZE)
        stop = rank(cache, end, most, BLOCK_SIZE)
        if options.window:
            first = rank(cache, begin, most, BLOCK_SIZE)
        if not options.looked_up:
            end = stop
    start = first // KEYS * KEYS
    if config.split and config.segment == 0:
        # In whole steps; of few keys, the last splits get none.
        last = stop
        steps = tl.maximum(last - start + KEYS - 1, 0) // KEYS
        share = tl.maximum(tl.cdiv(steps, tl.num_programs(1)), config.min_steps)
        start += tl.program_id(1) * share * KEYS
        stop = tl.minimum(start + share * KEYS, last)
    return Span(begin=begin, end=end, start=start, stop=stop)


@triton.jit
def middle_of(span, task, cache, config: tl.constexpr):
    """The key before which no mask is needed: if the first row sees a key, so do the others.

    Where drafts branch this holds in their context alone.
    """
    middle = task.seq_len
    if config.options.words > 0:
        middle = tl.maximum(task.seq_len - task.query_len, 0)
    elif config.options.causal:
        middle = tl.maximum(task.seq_len - (task.query_len - task.first) + 1, 0)
    if config.options.selection:
        BLOCK_SIZE: tl.constexpr = config.layout.block_size
        middle = rank(cache, middle, most_listed(cache, middle, BLOCK_SIZE), BLOCK_SIZE)
    return tl.minimum(tl.maximum(middle // config.keys * config.keys, span.start), span.stop)


@triton.jit
def load_queries(
    rows, places, cache, span, task, formula, config: tl.constexpr, tile: tl.constexpr
):
    """The queries of a tile, and the formula; for eight bits with a scale for each row."""
    widths: tl.constexpr = config.widths
    negate: tl.constexpr = config.options.negate
    unit: tl.constexpr = config.layout.stride_unit
    tokens, heads, exists = places.tokens, places.heads, places.exists
    query = rows.query + tokens.to(tl.int64)[:, None] * (rows.query_token_stride * unit)
    query += heads.to(tl.int64)[:, None] * (rows.query_head_stride * unit)
    head_dim: tl.constexpr = widths.head_dim
    scale = formula.scale
    if config.layout.nibbles:
        WIDTH: tl.constexpr = widths.dims // 2
        q = load_query(query, exists, 0, WIDTH, head_dim // 2, negate)
        q_rest = load_query(query, exists, head_dim // 2, WIDTH, head_dim, negate)
    else:
        q = load_query(query, exists, 0, widths.dims, head_dim, negate)
        q_rest = q
        if widths.rest > 0:
            q_rest = load_query(query, exists, widths.dims, widths.rest, head_dim, negate)
    if config.layout.by_heads:
        scale *= head_scale(cache.key_scale, cache.key_scale_stride, cache.kv_head)
    if config.layout.halves:
        factors = factors_of(q, q_rest)
        q, q_rest = halved(q, factors), halved(q_rest, factors)
        scale = scale * factors
    ROWS: tl.constexpr = tile.rows
    slopes = tl.zeros([ROWS], tl.float32)
    if config.options.alibi:
        slopes = tl.load(rows.alibi_slopes + heads, mask=exists, other=0.0)
    positions = task.seq_len - (task.query_len - task.first) + tokens
    # Rows that do not exist have the first one's line: it lies inside the array.
    words = tl.where(exists, tokens, 0) * config.options.words
    lines = Lines(
        context=task.seq_len - task.query_len, depths=rows.depths, words=rows.ancestors + words
    )
    if config.options.words > 0:
        positions = standing(lines, positions, exists)
    if config.options.selection and not config.options.looked_up:
        positions = last_seen(cache, span, task, positions, config)
    formula = Formula(scale=scale, cap=formula.cap, window=formula.window)
    queries = Queries(q=q, q_rest=q_rest, positions=positions, slopes=slopes, lines=lines)
    return queries, formula


@triton.jit
def load_query(
    rows, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr,
    NEGATE: tl.constexpr,
):  # fmt: skip
    """`[rows, WIDTH]`: the columns of the rows' queries from FIRST on."""
    dims = FIRST + tl.arange(0, WIDTH)
    q = tl.load(rows + dims[None, :], mask=exists[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return -q if NEGATE else q


@triton.jit
def first_state(rows, places, task, config: tl.constexpr, tile: tl.constexpr):
    """The state before any key: of nothing, or of the sinks."""
    ROWS: tl.constexpr = tile.rows
    highest = nothing_seen(ROWS)
    total = tl.zeros([ROWS], tl.float32)
    if config.options.sinks:
        # The softmax begins with a logit that has no value.
        mask = places.exists & task.has_sinks & (tl.program_id(1) == 0)
        highest = tl.load(rows.sinks + places.heads, mask=mask, other=float("-inf"))
        total = tl.where(highest > float("-inf"), 1.0, 0.0)
        if not config.options.alibi:
            highest *= LOG2E
    return State(highest=highest, total=total, sums=empty_state(config, tile).sums)


@triton.jit
def store_no_parts(rows, task, skipped, tile: tl.constexpr):
    """Says that padding tokens, from a number of tokens on, have no keys in any part."""
    places = tl.arange(0, tile.rows)
    tokens = places // tile.heads
    heads = places % tile.heads
    left = task.query_len - task.first
    exists = (tokens < tile.tokens) & (tokens + skipped < left) & (heads < task.num_heads)
    places = Places(tokens=tokens + skipped, heads=heads, exists=exists)
    for part in range(tl.program_id(1), rows.num_parts, tl.num_programs(1)):
        store_top(rows, places, nothing_seen(tile.rows), part)


@triton.jit
def store_state(rows, cache, task, state, config: tl.constexpr, tile: tl.constexpr):
    """Stores what a tile's keys gave."""
    alibi: tl.constexpr = config.options.alibi
    over, log_total = finished(state.highest, state.total, alibi)
    values = columns_of(state, config, tile) / over[:, None]
    if config.layout.by_heads:
        values *= head_scale(cache.value_scale, cache.value_scale_stride, cache.kv_head)
    store_rows(rows, task, values, log_total, 0, config, tile)


@triton.jit
def columns_in_order(config: tl.constexpr):
    """The column of each of `columns_of`, and whether it exists."""
    COLUMNS: tl.constexpr = config.widths.value_dim
    WIDTH: tl.constexpr = config.widths.value_dims
    dims = tl.arange(0, WIDTH)
    if config.layout.nibbles and COLUMNS < WIDTH:  # halves are padded each
        at = dims % (WIDTH // 2)
        return dims // (WIDTH // 2) * (COLUMNS // 2) + at, at < COLUMNS // 2
    return dims, dims < COLUMNS


@triton.jit
def store_rows(rows, task, values, log_total, skipped, config: tl.constexpr, tile: tl.constexpr):
    """Stores the tile that begins `skipped` tokens later."""
    widths: tl.constexpr = config.widths
    places = tl.arange(0, tile.rows)
    columns, inside = columns_in_order(config)
    tokens = places // tile.heads
    heads = places % tile.heads
    left = task.query_len - task.first
    exists = (tokens < tile.tokens) & (tokens + skipped < left) & (heads < task.num_heads)
    row = (tokens + skipped).to(tl.int64) * rows.num_heads + heads
    tl.store(
        rows.out + row[:, None] * widths.value_dim + columns[None, :],
        values.to(rows.out.dtype.element_ty),
        mask=exists[:, None] & inside[None, :],
    )
    tl.store(rows.lse + row, log_total, mask=exists)
