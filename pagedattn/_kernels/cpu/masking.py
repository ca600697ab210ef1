"""From logits of a chunk of keys to weights: what a call's options make of them."""

from .compiling import fast
from .listed import run_of
from .memory import get_float32, put_float32
from .softmax import (
    CHUNK,
    NONE,
    ZERO,
    add_alibi_of_query,
    add_bias,
    cap_logits,
    hide,
    hide_other_lines,
    key_range,
    position_of,
    raise_highest,
    soften,
)


@fast
def mask_and_soften(args, item, kv_head, first, count, logits, shown, highest, total, kept):
    """From logits of a chunk and a KV head to weights."""
    by_position = args.slopes != 0 or args.bias != 0 or args.depths != 0 or item.num_queries > 1
    for i in range(item.num_queries):
        for g in range(args.group):
            row, head = i * args.group + g, kv_head * args.group + g
            at = logits + 4 * row * CHUNK
            if args.soft_cap > ZERO:
                cap_logits(args.soft_cap, at, count)
            done = 0 if by_position else count
            while done < count:
                position, held = run_of(args, item, first + done, count - done)
                mask_run(args, item, i, head, position, held, at + 4 * done)
                done += held
            if args.bias != 0:
                note_shown(at, shown)
            raise_highest(at, highest, kept, row)
    # In a loop of its own: in one with the search, each row's weights would wait for its end.
    for row in range(item.num_queries * args.group):
        soften(logits + 4 * row * CHUNK, highest, total, kept, row)


@fast
def mask_run(args, item, i, head, first, count, logits):
    """Masks the logits of query i and of keys that follow one another from position `first` on."""
    if args.slopes != 0:
        slope = get_float32(args.slopes, head)
        add_alibi_of_query(args, item, slope, logits, i, first, count)
    if args.bias != 0:
        bias = args.bias + (item.token + i) * args.bias_token + head * args.bias_head
        add_bias(bias + 4 * first, logits, args.bias_columns - first, count)
    if item.num_queries > 1:
        slot = item.position + i
        begin, end = key_range(args, item.seq_len, position_of(args, item, i), slot)
        hide(logits, begin, end, first, count)
    if args.depths != 0:
        hide_other_lines(args, item, logits, i, first, count)


@fast
def note_shown(logits, shown):
    """Which keys some row sees: those where `shown` is not -inf."""
    for k in range(CHUNK):
        logit = get_float32(logits, k)
        put_float32(shown, k, get_float32(shown, k) if logit == NONE else logit)
