"""A Triton kernel and its arguments as the message that jaxlib's launcher reads.

The launcher is the one that Pallas uses. Triton compiles the kernels to machine code here, as it
does for torch: XLA's assembler allots registers differently, which costs some of them 7 % of speed.
"""

import functools
import zlib
from collections.abc import Iterator
from importlib.metadata import version

import jax
import triton
from jaxlib import gpu_triton as launcher
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ..._arrays.shard_map import axes_of, varying
from ..._kernels.triton.launch import Launch

# From this version on the launcher takes machine code; older ones take PTX and assemble it.
TAKES_BINARIES = tuple(map(int, version("jaxlib").split(".")[:3])) >= (0, 11, 2)
TYPES = {
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "int32": "*i32",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e5m2": "*fp8e5",
    "int8": "*i8",
    "uint8": "*u8",
}
DIVISIBILITY = 16  # bytes: what divides the addresses of XLA's arrays


def missing() -> list[str]:
    """Why this jaxlib has no launcher; empty if it has."""
    if hasattr(launcher, "TritonKernel"):
        return []
    return ["it needs JAX for CUDA (this jaxlib has no CUDA plugin): pip install 'jax[cuda13]'"]


def start(kernel, arrays, launch: Launch, outs) -> tuple:
    """The results of a launch, one after another, where tuples among `outs` are flattened."""
    opaque = encoded(kernel, arrays, launch, outs)
    given, shapes = jax.tree.leaves(arrays), jax.tree.leaves(outs)
    call = jax.ffi.ffi_call("triton_kernel_call_ffi", shapes, vmap_method="sequential")
    results = call(*given, name=kernel.__name__, opaque=opaque)
    return varying(tuple(results), axes_of(given))


def encoded(kernel, arrays, launch: Launch, outs) -> bytes:
    """The argument `opaque` of `triton_kernel_call_ffi`: a compressed protobuf message.

    `arrays` and `outs` are the kernel's first and last arguments, arrays or tuples of arrays. The
    launcher takes them one after another.
    """
    scalars = launch.scalars.values()
    kinds = ["fp32" if isinstance(scalar, float) else "i32" for scalar in scalars]
    inputs, results = jax.tree.map(lambda array: TYPES[array.dtype.name], (arrays, outs))
    constants = tuple(launch.constants.items())
    types = (*inputs, *kinds, *results)
    code = _compiled(kernel, types, constants, *launch[3:])
    # The launcher looks a program up by its text at each launch. Where the machine code travels
    # beside it, the text can be a hash, which is compared faster.
    text = code.hash if TAKES_BINARIES else code.asm["ptx"]
    sizes = launch.num_warps, 1, code.metadata.shared
    loaded = launcher.TritonKernel(code.metadata.name, *sizes, text, "", _capability())
    array = launcher.create_array_parameter(0, DIVISIBILITY)
    parameters = [array] * len(jax.tree.leaves(arrays))
    parameters += map(launcher.create_scalar_parameter, scalars, kinds)
    parameters += [array] * len(jax.tree.leaves(outs))
    call = launcher.TritonKernelCall(loaded, *launch.grid, parameters)
    message = call.to_proto(kernel.__name__, b"")
    return zlib.compress(message + binary_part(code) if TAKES_BINARIES else message)


@functools.cache
def _compiled(kernel, types, constants, num_warps, num_stages, most_registers, contracts):
    """The kernel, compiled for the first GPU; not specialised on scalars: one serves all values."""
    signature = dict(zip(kernel.arg_names, types, strict=False))
    signature |= {name: "constexpr" for name, _ in constants}
    aligned = {path: [["tt.divisibility", DIVISIBILITY]] for path in pointers(types)}
    source = ASTSource(kernel, signature, dict(constants), aligned)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    options |= {"maxnreg": most_registers, "enable_fp_fusion": contracts}
    target = GPUTarget("cuda", _capability(), 32)
    with knobs.compilation.scope():
        # Line numbers make up half of a message, which XLA copies at each launch: 1 us.
        knobs.compilation.disable_line_info = True
        return triton.compile(source, target=target, options=options)


def pointers(types) -> Iterator[tuple[int, ...]]:
    """Where the pointers are among types, some of them in tuples.

    >>> list(pointers((("*fp16", "*i32"), "fp32", "*fp16")))
    [(0, 0), (0, 1), (2,)]
    """
    for i, kind in enumerate(types):
        if isinstance(kind, tuple):
            yield from ((i, *path) for path in pointers(kind))
        elif kind.startswith("*"):
            yield (i,)


@functools.cache
def _capability() -> int:
    return launcher.get_compute_capability(0)


def binary_part(code) -> bytes:
    """The machine code, to append to a message: protobuf readers merge what is concatenated."""
    image = field(1, code.asm["cubin"]) + field(2, code.metadata.name.encode())
    image += b"\x18" + varint(code.metadata.shared)
    return field(1, field(1, field(11, image)))


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protobuf message, with a number below 16.

    >>> field(2, b"abc")
    b'\\x12\\x03abc'
    """
    return bytes([number << 3 | 2]) + varint(len(content)) + content


def varint(number: int) -> bytes:
    """A natural number as protobuf writes it, seven bits to a byte.

    >>> varint(300)
    b'\\xac\\x02'
    """
    if number < 128:
        return bytes([number])
    return bytes([number & 127 | 128]) + varint(number >> 7)
