"""The walk of a tile over its keys: loads, logits, masks and the online softmax."""

import triton
import triton.language as tl

from .eight_bits import in_pairs, octets, taken_apart, widened

LOG2E = tl.constexpr(1.4426950408889634)
ONE = tl.constexpr(1.0)


@triton.jit
def walk(
    highest, total, summed, odd, start, stop, begin, end, q, q_rest, key, value, table, positions,
    slopes, scale, cap, window, num_blocks, block_stride, slot_stride,
    value_block_stride, value_slot_stride,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, REST: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_DIMS: tl.constexpr, LATENT: tl.constexpr, ALIKE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, KEYS: tl.constexpr, APART: tl.constexpr, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, ALIBI: tl.constexpr,
    PAIRS: tl.constexpr, SMALL: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys from start to stop; only those in [begin, end) are read.

    With MASKED backwards: the last step may have few keys, and as the first one it costs little,
    because the loads of the first two steps are under way together.

    With PAIRS, of eight bits, there is a `scale` for each row, and values are read as pairs of
    columns: `summed` has the even ones of them and `odd` the odd ones.

    Without ALiBi `scale` (or `cap`) includes log2(e), so that exp becomes a bare exp2. With ALiBi
    the factor comes last: slope times distance may be large, and is exact only without it.
    """
    if APART:
        rounded = tl.zeros([q.shape[0], KEYS], q.dtype)
    last = start + (stop - start - 1) // KEYS * KEYS
    for done in range(0, stop - start, KEYS):
        step = last - done if MASKED else start + done
        keys = step + tl.arange(0, KEYS)
        inside = (keys >= begin) & (keys < end)
        blocks = load_blocks(table, step, keys, inside, num_blocks, BLOCK_SIZE, KEYS, MASKED)
        slots = keys % BLOCK_SIZE
        if not SMALL:
            blocks, slots = blocks.to(tl.int64), slots.to(tl.int64)
        offsets = blocks * (block_stride * STRIDE_UNIT) + slots * (slot_stride * STRIDE_UNIT)
        # Keys that no row sees are not read: a NaN there would survive a weight of 0.
        # Eight bits become the query's dtype in registers.
        if PAIRS:
            k = load_slots(octets(key), offsets, inside, 0, DIMS, HEAD_DIM, MASKED)
            k = widened(k, key.dtype.element_ty)
        else:
            k = load_slots(key, offsets, inside, 0, DIMS, HEAD_DIM, MASKED).to(q.dtype)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = load_slots(key, offsets, inside, DIMS, REST, HEAD_DIM, MASKED).to(q.dtype)
            if APART:
                products = products * scale
                products += tl.dot(q_rest, tl.trans(k_rest), input_precision="ieee") * scale
            else:
                products = tl.dot(q_rest, tl.trans(k_rest), products, input_precision="ieee")
        elif APART:
            products = products * scale
        elif PAIRS:
            products = products * scale[:, None]
        v = k
        if not LATENT:
            if not ALIKE:
                offsets = blocks * (value_block_stride * STRIDE_UNIT)
                offsets += slots * (value_slot_stride * STRIDE_UNIT)
            if PAIRS:
                half: tl.constexpr = VALUE_DIM // 2
                v = load_slots(
                    in_pairs(value), offsets // 2, inside, 0, VALUE_DIMS // 2, half, MASKED
                )  # fmt: skip
            else:
                v = load_slots(value, offsets, inside, 0, VALUE_DIMS, VALUE_DIM, MASKED)
                v = v.to(q.dtype)
        if APART:
            # The compiler gives each warp all keys of a product that leads to another one, so
            # that pairs of warps compute the same; through a branch it does not see that.
            kept = total
            if done < stop - start:
                weights, kept, highest, total = weigh(
                    products, highest, total, keys, inside, positions, slopes, 1.0, cap, window,
                    MASKED, CAUSAL, WINDOW, SOFT_CAP, ALIBI,
                )  # fmt: skip
                rounded = weights.to(q.dtype)
        else:
            weights, kept, highest, total = weigh(
                products, highest, total, keys, inside, positions, slopes,
                1.0 if PAIRS else scale, cap, window,
                MASKED, CAUSAL, WINDOW, SOFT_CAP, ALIBI,
            )  # fmt: skip
        summed = summed * kept[:, None]
        if not APART:
            rounded = weights.to(q.dtype)
        if PAIRS:
            # Not before: until here they take half the registers.
            v, v_odd = taken_apart(v, value.dtype.element_ty)
            odd = tl.dot(rounded, v_odd, odd * kept[:, None])
        summed = tl.dot(rounded, v, summed, input_precision="ieee")
    return highest, total, summed, odd


@triton.jit
def weigh(
    products, highest, total, keys, inside, positions, slopes, scale, cap, window,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
    ALIBI: tl.constexpr,
):  # fmt: skip
    """A step of the online softmax: its weights, the factor on what was summed, and the state."""
    exponent: tl.constexpr = LOG2E if ALIBI else ONE
    logits = cap * tanh(products * scale) if SOFT_CAP else products * scale
    distance = positions[:, None] - keys[None, :]
    if ALIBI:
        logits -= slopes[:, None] * tl.abs(distance).to(tl.float32)
    if MASKED:
        visible = inside[None, :]
        if CAUSAL:
            visible = visible & (distance >= 0)
        elif WINDOW:
            visible = visible & (-distance < window)
        if WINDOW:
            visible = visible & (distance < window)
        logits = tl.where(visible, logits, float("-inf"))
    if MASKED or SOFT_CAP or ALIBI:
        new_highest = tl.maximum(highest, tl.max(logits, 1))
    else:
        # The same maximum, as scale is not negative, with one multiplication a row.
        new_highest = tl.maximum(highest, tl.max(products, 1) * scale)
    shift = new_highest
    if MASKED:
        shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)
    weights = tl.exp2((logits - shift[:, None]) * exponent)
    kept = tl.exp2((highest - shift) * exponent)
    total = total * kept + tl.sum(weights, 1)
    return weights, kept, new_highest, total


@triton.jit
def load_blocks(
    table, step, keys, inside, num_blocks, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """The block of each key of a step; ids are clamped to the cache."""
    if BLOCK_SIZE % KEYS == 0:
        blocks = tl.load(table + step // BLOCK_SIZE)  # the step lies in one block
    elif MASKED:
        blocks = tl.load(table + keys // BLOCK_SIZE, mask=inside, other=0)
    else:
        blocks = tl.load(table + keys // BLOCK_SIZE)
    return tl.minimum(tl.maximum(blocks, 0), num_blocks - 1)


@triton.jit
def load_slots(
    plane, offsets, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """`[KEYS, WIDTH]` of a plane's COLUMNS, from FIRST on; 0 where nothing is to be read."""
    dims = FIRST + tl.arange(0, WIDTH)
    pointers = plane + offsets[:, None] + dims[None, :]
    if MASKED and FIRST + WIDTH > COLUMNS:
        return tl.load(pointers, mask=inside[:, None] & (dims < COLUMNS)[None, :], other=0.0)
    if MASKED:
        return tl.load(pointers, mask=inside[:, None], other=0.0)
    if FIRST + WIDTH > COLUMNS:
        return tl.load(pointers, mask=(dims < COLUMNS)[None, :], other=0.0)
    return tl.load(pointers)


@triton.jit
def tanh(x):
    """tanh to float32 rounding: by a polynomial near 0, where the exponential would cancel."""
    square = x * x
    near = -0.0062763858 * square + 0.0211162125
    near = near * square - 0.0538751378
    near = near * square + 0.1333292400
    near = near * square - 0.3333333043
    near = x + x * square * near
    size = tl.abs(x)
    fading = tl.exp2(size * (-2.0 * LOG2E))
    far = (1.0 - fading) / (1.0 + fading)
    return tl.where(size < 0.6, near, tl.where(x < 0, -far, far))
