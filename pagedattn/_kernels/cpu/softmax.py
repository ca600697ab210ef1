"""What makes weights of logits: soft-caps, biases, masks, the online softmax."""

import numpy as np

from .call_args import NO_WINDOW
from .compiling import fast
from .memory import get_float32, get_int32, put_float32
from .scalar_math import exp, tanh
from .simd import KEYS
from .store_row import highest_of

CHUNK = 64  # keys; a multiple of KEYS
AHEAD = 4 * KEYS  # keys multiplied for one KV head before the next one's turn, while others come
NONE = np.float32(-np.inf)
ZERO, ONE = np.float32(0), np.float32(1)
WORD = 32  # drafts of a word of ancestors


@fast
def key_range(args, seq_len, lowest, highest):
    """The keys that any query from position `lowest` to `highest` may see."""
    first = max(np.int64(0), lowest - args.window + 1)
    reach = np.int64(1) if args.causal else args.window
    return first, max(first, min(seq_len, highest + reach))


@fast
def cap_logits(cap, logits, count):
    for k in range(count):
        put_float32(logits, k, cap * tanh(get_float32(logits, k) / cap))


@fast
def add_alibi(slope, logits, position, first, count):
    for k in range(count):
        apart = np.float32(np.int32(abs(position - first - k)))
        put_float32(logits, k, get_float32(logits, k) - slope * apart)


@fast
def lowest_position(args, context, token, position, count):
    """That of `count` queries from a token on, whose slot is `position`; drafts stand by depth.

    As every draft comes after its line, the highest is never above `position + count - 1`.
    """
    if args.depths == 0:
        return position
    lowest = np.int64(get_int32(args.depths, token))
    for other in range(token + 1, token + count):
        lowest = min(lowest, np.int64(get_int32(args.depths, other)))
    return context + lowest


@fast
def position_of(args, item, i):
    """That of query i."""
    return lowest_position(args, item.context, item.token + i, item.position + i, 1)


@fast
def drafts_of(item, i, first, count):
    """Which keys from `first` on are those of drafts, up to query i's: a range of indices."""
    end = max(min(count, item.position + i + 1 - first), 0)
    return min(max(item.context - first, 0), end), end


@fast
def depths_at(args, item, key):
    """The address of the depth of the draft whose key that is; the next one's follows."""
    return args.depths + 4 * (item.token + key - item.position)


@fast
def add_alibi_of_query(args, item, slope, logits, i, first, count):
    """`add_alibi` where keys of drafts stand at their depths; of those after query i's, nothing."""
    position = position_of(args, item, i)
    if args.depths == 0:
        add_alibi(slope, logits, position, first, count)
        return
    begin, end = drafts_of(item, i, first, count)
    add_alibi(slope, logits, position, first, begin)
    depths, away = depths_at(args, item, first), np.int32(position - item.context)
    for k in range(begin, end):
        apart = np.float32(np.int32(abs(away - get_int32(depths, k))))
        put_float32(logits, k, get_float32(logits, k) - slope * apart)


@fast
def hide_other_lines(args, item, logits, i, first, count):
    """-inf at the keys of drafts, up to query i's, that are of other lines or behind its window."""
    begin, end = drafts_of(item, i, first, count)
    line, key = args.ancestors + 4 * args.words * (item.token + i), begin
    while key < end:
        own = first + key - item.context
        stop = min(end, key + WORD - own % WORD)
        bits = get_int32(line, min(own // WORD, args.words - 1))
        if bits != -1:
            hide_by_bits(bits >> np.int32(own % WORD), logits, key, stop)
        key = stop
    if args.window != NO_WINDOW and begin < end:
        depths, nearest = depths_at(args, item, first), position_of(args, item, i)
        nearest -= item.context + args.window - 1
        for k in range(begin, end):
            if np.int64(get_int32(depths, k)) < nearest:
                put_float32(logits, k, NONE)


@fast
def hide_by_bits(bits, logits, begin, end):
    """-inf where a bit is 0, the lowest of which is that of the first logit."""
    for k in range(begin, end):
        seen = (bits >> np.int32(k - begin)) & 1 != 0
        put_float32(logits, k, get_float32(logits, k) if seen else NONE)


@fast
def add_bias(bias, logits, columns, count):
    """-inf hides a key, whatever its logit is, as do keys without a column."""
    held = max(np.int64(0), min(columns, count))
    for k in range(held):
        added = get_float32(bias, k)
        logit = get_float32(logits, k) + added
        put_float32(logits, k, NONE if added == NONE else logit)
    for k in range(held, count):
        put_float32(logits, k, NONE)


@fast
def hide(logits, begin, end, first, count):
    """-inf at the keys of a chunk that are not in `[begin, end)`, which a query may see."""
    for k in range(min(max(begin - first, 0), count)):
        put_float32(logits, k, NONE)
    for k in range(max(end - first, 0), count):
        put_float32(logits, k, NONE)


@fast
def raise_highest(logits, highest, kept, row):
    """Updates a row's highest logit, and by what its sums shrink."""
    before = get_float32(highest, row)
    top = max(before, highest_of(logits, CHUNK))
    put_float32(highest, row, top)
    put_float32(kept, row, ONE if top == before else exp(before - shift_of(top)))


@fast
def soften(logits, highest, total, kept, row):
    """Turns a row's logits into weights; updates its sum of weights."""
    shift, summed = shift_of(get_float32(highest, row)), ZERO
    for k in range(CHUNK):
        weight = exp(get_float32(logits, k) - shift)
        put_float32(logits, k, weight)
        summed += weight
    put_float32(total, row, get_float32(total, row) * get_float32(kept, row) + summed)


@fast
def shift_of(top):
    return ZERO if top == NONE else top
