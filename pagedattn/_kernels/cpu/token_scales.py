"""Per-token scales of a chunk of eight bits, for all heads of a work item at once.

Those of a token's heads are neighbours, so a vector has them, and a chunk's vectors are transposed.
"""

from llvmlite import ir
from numba import types

from .compiling import intrinsic, within
from .memory import get_float32, get_int64, put_float32
from .simd import F32, at, i64, load, picks, store
from .softmax import CHUNK

EIGHT = 8  # heads, and keys
VECTOR = ir.VectorType(F32, EIGHT)
INTERLEAVED = [lane for i in range(EIGHT) for lane in (i, EIGHT + i)]  # those of two vectors
HALVES = picks(INTERLEAVED[:EIGHT]), picks(INTERLEAVED[EIGHT:])


@within
def gather_scales(scales, head, heads, slots, out):
    """Copies float32 scales to `[heads, CHUNK]`, from KV head `head` on.

    `slots[k]` is the index of the scale of key k for head 0.
    """
    whole = heads - heads % EIGHT
    for place in range(0, whole, EIGHT):
        for k in range(0, CHUNK, EIGHT):
            row = out + 4 * (place * CHUNK + k)
            _transpose(scales + 4 * (head + place), slots + 8 * k, row)
    for place in range(whole, heads):
        for k in range(CHUNK):
            scale = get_float32(scales, get_int64(slots, k) + head + place)
            put_float32(out, place * CHUNK + k, scale)


@intrinsic
def _transpose(typing, scales, slots, out):
    """Scales of EIGHT heads and keys, to rows of CHUNK for each head."""

    def code(context, builder, signature, args):
        scales, slots, out = args

        def of_key(k):
            slot = builder.load(at(builder, slots, i64(8 * k), scales.type))
            return load(builder, at(builder, scales, builder.mul(slot, i64(4)), VECTOR), 4)

        rows = [of_key(k) for k in range(EIGHT)]
        for _ in range(3):  # each interleaves the first half of the rows and the second
            pairs = list(zip(rows[: EIGHT // 2], rows[EIGHT // 2 :], strict=True))
            rows = [builder.shuffle_vector(*pair, half) for pair in pairs for half in HALVES]
        for head, row in enumerate(rows):
            store(builder, row, at(builder, out, i64(4 * CHUNK * head), VECTOR), 4)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), code
