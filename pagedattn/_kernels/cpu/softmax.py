"""From logits of a chunk of keys to weights: soft-caps, biases, masks, the online softmax."""

import numpy as np

from .compiling import fast
from .memory import get_float32, get_int32, put_float32
from .scalar_math import exp, tanh
from .store_row import highest_of

CHUNK = 64  # keys; a multiple of KEYS
NONE = np.float32(-np.inf)
ZERO, ONE = np.float32(0), np.float32(1)


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
def standing(args, work_item, key):
    """The position of a key of drafts that branch, or of their context."""
    context = work_item.position
    if key < context:
        return key
    return context + np.int64(get_int32(args.depths, work_item.token + key - context))


@fast
def add_alibi_of_lines(args, work_item, slope, logits, position, first, count):
    """`add_alibi` where drafts branch."""
    for k in range(count):
        apart = np.float32(np.int32(abs(position - standing(args, work_item, first + k))))
        put_float32(logits, k, get_float32(logits, k) - slope * apart)


@fast
def hide_other_lines(args, work_item, logits, i, position, first, count):
    """`hide` where drafts branch: also the keys of other lines than query i's."""
    context, begin = work_item.position, position - args.window + 1
    line = args.ancestors + 4 * args.words * (work_item.token + i)
    for k in range(min(max(begin - first, 0), count)):
        put_float32(logits, k, NONE)
    for k in range(max(context - first, 0), count):
        own = first + k - context
        word = get_int32(line, min(own // 32, args.words - 1))
        behind = standing(args, work_item, first + k) < begin
        if behind or (word >> np.int32(own % 32)) & 1 == 0:
            put_float32(logits, k, NONE)


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
def note_shown(logits, shown):
    """Which keys some row sees: those where `shown` is not -inf."""
    for k in range(CHUNK):
        logit = get_float32(logits, k)
        put_float32(shown, k, get_float32(shown, k) if logit == NONE else logit)


@fast
def hide(logits, begin, end, first, count):
    """-inf at the keys of a chunk that are not in `[begin, end)`, which a query may see."""
    for k in range(min(max(begin - first, 0), count)):
        put_float32(logits, k, NONE)
    for k in range(max(end - first, 0), count):
        put_float32(logits, k, NONE)


@fast
def standing_of_query(args, work_item, i):
    if args.depths != 0:
        return standing(args, work_item, work_item.position + i)
    return work_item.position + i


@fast
def soften(logits, highest, total, kept, row):
    """Turns a row's logits into weights; updates its highest logit and its sum of weights."""
    before = get_float32(highest, row)
    top = max(before, highest_of(logits, CHUNK))
    shift = ZERO if top == NONE else top
    summed = ZERO
    for k in range(CHUNK):
        weight = exp(get_float32(logits, k) - shift)
        put_float32(logits, k, weight)
        summed += weight
    factor = ONE if top == before else exp(before - shift)
    put_float32(highest, row, top)
    put_float32(total, row, get_float32(total, row) * factor + summed)
    put_float32(kept, row, factor)


@fast
def mask_and_soften(args, work_item, kv_head, first, count, logits, shown, highest, total, kept):
    """From logits of a chunk and a KV head to weights."""
    for i in range(work_item.num_queries):
        position = standing_of_query(args, work_item, i)
        for g in range(args.group):
            row, head = i * args.group + g, kv_head * args.group + g
            at = logits + 4 * row * CHUNK
            if args.soft_cap > ZERO:
                cap_logits(args.soft_cap, at, count)
            if args.slopes != 0:
                slope = get_float32(args.slopes, head)
                if args.depths != 0:
                    add_alibi_of_lines(args, work_item, slope, at, position, first, count)
                else:
                    add_alibi(slope, at, position, first, count)
            if args.bias != 0:
                bias = args.bias + (work_item.token + i) * args.bias_token + head * args.bias_head
                add_bias(bias + 4 * first, at, args.bias_columns - first, count)
            if args.depths != 0:
                hide_other_lines(args, work_item, at, i, position, first, count)
            elif work_item.num_queries > 1:
                begin, end = key_range(args, work_item.seq_len, position, position)
                hide(at, begin, end, first, count)
            if args.bias != 0:
                note_shown(at, shown)
            soften(at, highest, total, kept, row)
