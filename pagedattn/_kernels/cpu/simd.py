"""Vectors of float32 as wide as the CPU at hand has them, and loops along memory in LLVM.

LLVM does not find the forms of `qk_1` and `pv_1` from loops over numbers: accumulators that stay in
registers, each key widened once for several rows, and sums across vectors by one tree of shuffles.
"""

from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba.core import cgutils, registry

TARGET: Any = registry.cpu_target
# What Numba compiles for, whose settings may take from what the CPU has: LLVM ends the process at
# an instruction that it was not allowed.
TRIPLE, CPU, FEATURES = TARGET.target_context.codegen().magic_tuple()
LANES = 16 if "+avx512bw" in FEATURES else 8 if "+avx2" in FEATURES else 4
# Registers bound the tiles: those with AVX-512 and NEON have 32, others 16.
MANY = LANES != 8
KEYS = 4 if MANY else 2  # keys of a tile of logits
SPAN = 4 if MANY else 2  # vectors of a value row in a tile of sums
LINE = 64  # bytes that are fetched at once
# Products of pairs of bfloat16, added up in float32. To LLVM 15, that of Numba 0.61, they are
# products of integers, and bfloat16 is no number.
HAS_BF16_DOT = "+avx512bf16" in FEATURES and llvm_version_info >= (16,)
HAS_FLOAT16 = "+f16c" in FEATURES or not TRIPLE.startswith("x86")  # float16 from float32 and back
HAS_BYTE_LOOK_UPS = HAS_BF16_DOT and "+avx512vbmi" in FEATURES  # of bytes, in tables in registers
# Sums of two products of 16-bit integers; with VNNI, LLVM adds them in the same instruction.
MADD = {16: "llvm.x86.avx512.pmaddw.d.512", 8: "llvm.x86.avx2.pmadd.wd"}.get(LANES)
HAS_INT16_MADD = MADD is not None
# Of unsigned bytes and signed ones: sums of two products in 16 bits, or with VNNI of four in 32.
MADD_BYTES = {16: "llvm.x86.avx512.pmaddubs.w.512", 8: "llvm.x86.avx2.pmadd.ub.sw"}.get(LANES)
HAS_VNNI = LANES == 16 and "+avx512vnni" in FEATURES

# By LLVM's names.
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
VECTOR = ir.VectorType(F32, LANES)
ZEROS = ir.Constant(VECTOR, [0.0] * LANES)
I32_VECTOR = ir.VectorType(I32, LANES)
I32_ZEROS = ir.Constant(I32_VECTOR, [0] * LANES)


def cpu_features() -> str:
    """What the CPU has of what may be used.

    >>> "float32" in cpu_features()
    True
    """
    uses = {
        f"vectors of {LANES} float32": True,
        "products of pairs of bfloat16": HAS_BF16_DOT,
        "look-ups of 8-bit numbers": HAS_BYTE_LOOK_UPS,
        "products of 16-bit integers": HAS_INT16_MADD,
        "sums of four products of 8-bit integers": HAS_VNNI,
        "float16 by integers": not HAS_FLOAT16,
    }
    return ", ".join(use for use, used in uses.items() if used)


class BFloat16(ir.Type):
    """LLVM's bfloat, which llvmlite does not know."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, BFloat16)

    def __hash__(self):
        return hash(BFloat16)


def i64(number):
    return ir.Constant(I64, number)


def at(builder, address, offset, kind):
    """A pointer to a kind of value, some bytes after an address."""
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def load(builder, pointer, align):
    value = builder.load(pointer)
    value.align = align
    return value


def store(builder, value, pointer, align):
    builder.store(value, pointer).align = align


def int64s_at(builder, address, count):
    """Some int64 that follow each other."""
    return [builder.load(at(builder, address, i64(8 * i), I64)) for i in range(count)]


def along(builder, width, begin, end, body):
    """`body(index)` for each whole `width` from `begin` to `end`; gives where they stop."""
    whole = builder.mul(builder.udiv(builder.sub(end, begin), i64(width)), i64(width))
    stop = builder.add(begin, whole)
    with cgutils.for_range_slice(builder, begin, stop, i64(width), I64) as (index, _):
        body(index)
    return stop


def fetch(builder, row, index, size):
    """Asks for the cache line of an element of a row, into the second level."""
    pointer = I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, I32, I32, I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
    hints = [I32(hint) for hint in (0, 2, 1)]  # to read, second level, data
    address = builder.add(row, builder.mul(index, i64(size)))
    builder.call(function, [builder.inttoptr(address, pointer), *hints])


def fused(builder, a, b, c):
    """a * b + c."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    name = f"llvm.fma.v{LANES}f32"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [a, b, c])


def add_pairs(builder, total, a, b):
    """The total plus products of pairs of neighbours: `a` and `b` have twice as many bfloat16."""
    pairs = ir.VectorType(BFloat16(), 2 * LANES)
    kind = ir.FunctionType(VECTOR, [VECTOR, pairs, pairs])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, *(builder.bitcast(x, pairs) for x in (a, b))])


def add_int16_pairs(builder, total, a, b):
    """The int32 total plus products of pairs of neighbours: twice as many int16 in `a` and `b`."""
    words = ir.VectorType(I16, 2 * LANES)
    kind = ir.FunctionType(I32_VECTOR, [words] * 2)
    function = cgutils.get_or_insert_function(builder.module, kind, MADD)
    return builder.add(total, builder.call(function, [a, b]))


def add_bytes(builder, total, a, b):
    """The int32 total plus products of fours of neighbours: bytes without sign, and with one."""
    kind = ir.FunctionType(I32_VECTOR, [I32_VECTOR] * 3)
    name = "llvm.x86.avx512.vpdpbusd.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [total, a, b])


def add_byte_pairs(builder, total, a, b):
    """The int16 total plus products of pairs of neighbours, of bytes as `add_bytes` takes them."""
    bytes_, words = ir.VectorType(I8, 4 * LANES), ir.VectorType(I16, 2 * LANES)
    kind = ir.FunctionType(words, [bytes_] * 2)
    function = cgutils.get_or_insert_function(builder.module, kind, MADD_BYTES)
    return builder.add(total, builder.call(function, [builder.bitcast(x, bytes_) for x in (a, b)]))


def looked_up(builder, table, numbers):
    """For each of 64 bytes, whose lower seven bits are an index, that entry of a table of 128."""
    bytes_ = ir.VectorType(I8, LINE)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(bytes_, [bytes_] * 3),
        "llvm.x86.avx512.vpermi2var.qi.512",
    )
    lower, upper = (ir.Constant(bytes_, list(table[i : i + LINE])) for i in (0, LINE))
    return builder.call(function, [lower, numbers, upper])


def permuted(builder, table, lanes):
    """For each of 32 int16 indices, that entry of a table of 32."""
    kind = ir.VectorType(I16, 32)
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(kind, [kind] * 2), "llvm.x86.avx512.permvar.hi.512"
    )
    return builder.call(function, [table, lanes])


def permuted_floats(builder, table, lanes):
    """For each of 16 numbers, whose lower four bits are an index, that entry of 16 float32."""
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(VECTOR, [VECTOR, I32_VECTOR]),
        "llvm.x86.avx512.permvar.sf.512",
    )
    return builder.call(function, [table, lanes])


def as_bfloat16(builder, numbers):
    """A vector of float32, rounded, on CPUs with products of pairs."""
    return builder.fptrunc(numbers, ir.VectorType(BFloat16(), LANES))


def as_bfloat16_pair(builder, first, second):
    """As `as_bfloat16`, of two vectors, one behind the other."""
    pairs = ir.VectorType(BFloat16(), 2 * LANES)
    kind = ir.FunctionType(pairs, [VECTOR] * 2)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    return builder.call(function, [second, first])


def spread(builder, number, count=LANES):
    """A number in all lanes."""
    empty = ir.Constant(ir.VectorType(number.type, count), ir.Undefined)
    one = builder.insert_element(empty, number, I32(0))
    return builder.shuffle_vector(one, empty, picks([0] * count))


def spread_at(builder, place):
    """The 32-bit integer at a place in all lanes, with AVX-512.

    LLVM would take `vbroadcastss` for products in float32, which keeps AMD's CPUs from shuffles.
    """
    kind = ir.FunctionType(I32_VECTOR, [place.type])
    return builder.asm(kind, "vpbroadcastd ($1), $0", "=v,r,~{memory}", [place], True)


def vectors_of(builder, numbers):
    """Numbers in vectors of LANES, in order."""
    count = numbers.type.count
    if count == LANES:
        return [numbers]
    starts = range(0, count, LANES)
    return [builder.shuffle_vector(numbers, numbers, picks(range(s, s + LANES))) for s in starts]


def picks(lanes):
    """A constant that says which lanes a shuffle takes."""
    return ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
