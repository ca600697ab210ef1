"""The Triton backend without a GPU: launch arithmetic; its kernels run in tests/interpreters."""

import ast
import importlib.util
import re
import subprocess
import sys
import zlib
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn._dispatch.call import Call, Strides
from pagedattn._kernels.triton.arguments import Arrays, Results, Scalars
from pagedattn._kernels.triton.device import device_of
from pagedattn._kernels.triton.launch import attention_launch, merge_launch, refusals
from pagedattn._kernels.triton.programs import held
from pagedattn._kernels.triton.tiling import MAX_SPLITS, tiling
from pagedattn._kernels.triton.widths import power_of_two
from pagedattn.cache.packing import held_dtype
from pagedattn.cache.quantise import scale_dtype
from pagedattn.extend import triton_call

ROOT = Path(__file__).parents[2]
SOURCES = [
    *ROOT.glob("pagedattn/_kernels/triton/*.py"),
    *ROOT.glob("pagedattn/backends/triton/*.py"),
    ROOT / "pagedattn_torch/backends/triton.py",
]
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
H200 = device_of(132, (9, 0))
SMALL = device_of(20, (8, 9))
B200 = device_of(148, (10, 0))
STRIDES = Strides((4096, 128, 1), *[(16384, 1024, 128, 1)] * 2)


LATENT = {"value_dim": 512, "strides": STRIDES._replace(value=())}
LATENT_DECODE = LATENT | {"head_dim": 576, "num_heads": 128, "num_kv_heads": 1}


def call(**sizes) -> Call:
    """A decode of 64 sequences of up to 4096 tokens, with changes."""
    defaults = {
        "num_tokens": 64,
        "num_heads": 32,
        "num_seqs": 64,
        "max_blocks": 256,
        "max_query_len": 1,
        "num_blocks": 1000,
        "block_size": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "dtype": "bfloat16",
        "device": "cuda",
        "strides": STRIDES,
        "spec": AttentionSpec(),
    }
    return Call(**defaults | sizes)


def test_what_does_not_fit_into_shared_memory_is_refused():
    wide = {"head_dim": 576, "value_dim": 512, "dtype": "float32"}
    assert "shared memory" in str(refusals(call(**wide), (8, 9)))
    assert not refusals(call(**wide), (9, 0))
    assert not refusals(call(**wide | LATENT), (8, 9))
    assert not refusals(call(**wide | {"dtype": "bfloat16"}), (8, 9))


def test_launch_arithmetic_loads_no_triton():
    code = "import pagedattn._kernels.triton.launch, sys; assert 'triton' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("device", [H200, SMALL, B200])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [16, 80, 128, 256, 576])
@pytest.mark.parametrize("group", [1, 3, 4, 71, 300])
@pytest.mark.parametrize("max_query_len", [1, 5, 16, 17, 8192])
def test_tiles_cover_the_batch(max_query_len, group, head_dim, dtype, device):
    """Every token of every sequence and every head has a tile, and programs are possible."""
    sizes = call(
        max_query_len=max_query_len,
        num_tokens=max_query_len * 3 + 2,
        num_seqs=3,
        num_heads=2 * group,
        num_kv_heads=2,
        head_dim=head_dim,
        dtype=dtype,
        **LATENT if head_dim > 512 else {},
    )
    tiles = tiling(sizes, device)
    assert tiles.tokens * tiles.heads <= tiles.program.rows
    assert tiles.heads * tiles.head_tiles >= group
    for size in (tiles.program.rows, tiles.program.keys, tiles.program.num_warps):
        assert power_of_two(size) == size
    assert tiles.program.rows >= 16
    assert tiles.program.keys >= 16
    if tiles.tiles_a_seq:
        assert tiles.tiles_a_seq * tiles.tokens >= max_query_len
        assert tiles.num_tiles > 3 * tiles.tiles_a_seq  # the padding's
    assert tiles.min_steps >= 1
    assert held(tiles.program, sizes, device) <= device.shared_bytes


@given(
    capability=st.sampled_from([(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)]),
    head_dim=st.integers(1, 576),
    value_dim=st.none() | st.integers(1, 512),
    latent=st.booleans(),
    group=st.integers(1, 200),
    max_query_len=st.integers(1, 5000),
    num_seqs=st.integers(1, 300),
    max_blocks=st.integers(1, 5000),
    dtype=st.sampled_from(["float16", "bfloat16", "float32"]),
    cache_dtype=st.sampled_from([None, "int8", "float8_e5m2", "int4"]),
)
def test_what_is_not_refused_fits(capability, latent, group, **sizes):
    """On any GPU; tests/targets shows that compiled programs take no more than is reckoned."""
    sizes |= {"num_tokens": sizes["num_seqs"] * sizes["max_query_len"]}
    sizes |= {"num_heads": 2 * group, "num_kv_heads": 2}
    if latent and sizes["value_dim"]:
        sizes |= LATENT | {"value_dim": min(sizes["value_dim"], sizes["head_dim"])}
    asked = call(**sizes)
    device = device_of(132, capability)
    if not refusals(asked, capability):
        assert held(tiling(asked, device).program, asked, device) <= device.shared_bytes


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 576, "value_dim": 512},
        {"head_dim": 66},
        {"value_dim": 30},
        {"head_dim": 64, **LATENT, "value_dim": 32},
        {"strides": STRIDES._replace(value=(16385, 1024, 128, 1))},
    ],
    ids=str,
)
def test_four_bits_that_it_does_not_read_are_refused_by_name(sizes):
    four = {"cache_dtype": "int4", "token_scales": True}
    assert not refusals(call(**four), None)
    reasons = refusals(call(**four | sizes), None)
    assert reasons
    assert all("int4" in reason for reason in reasons)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("queries", [3, 16, 300])
@pytest.mark.parametrize(
    ("cache_dtype", "head_dim", "most"),
    [("int8", 64, 32), ("int8", 128, 256), ("int4", 128, 32), ("float8_e5m2", 20, 32)],
)
def test_no_narrow_sums_by_wgmma(cache_dtype, head_dim, most, queries, batch_invariant):
    """Of fewer than 64 rows no product is one of wgmma."""
    sizes = {"cache_dtype": cache_dtype, "head_dim": head_dim, "max_query_len": queries}
    asked = call(**sizes, batch_invariant=batch_invariant, token_scales=cache_dtype == "int4")
    assert tiling(asked, H200).program.rows <= most


@pytest.mark.parametrize("tokens", [1, 4, 64])
def test_searched_tiles_are_enough(tokens):
    """Sequence s begins at tile start // tokens + s: no two overlap, and the last one fits."""
    lens = [1, 0, 0, 7, 64, 65, 3, 0, 128, 5]  # the last is the padding
    starts = [sum(lens[:s]) for s in range(len(lens) + 1)]
    begins = [start // tokens + s for s, start in enumerate(starts)]
    for length, begin, end in zip(lens, begins, begins[1:], strict=False):
        assert end - begin >= -(-length // tokens)
    assert begins[-1] <= starts[-1] // tokens + len(lens)


@pytest.mark.parametrize(
    ("sizes", "splits"),
    [
        ({}, 3),  # enough programs, but lengths may differ
        ({"max_blocks": 128}, 1),  # too short for it
        ({"num_seqs": 32, "num_tokens": 32}, 3),
        ({"num_seqs": 96, "num_tokens": 96}, 1),  # so many that they even out by themselves
        ({"num_seqs": 256, "num_tokens": 256, "max_blocks": 64}, 1),
        ({"max_blocks": 1024}, 12),  # 1408 keys each
        ({"max_blocks": 1024, "max_query_len": 8, "num_tokens": 512}, 6),  # dearer to merge
        ({"max_blocks": 1 << 16}, 16),  # most of the grid would be empty
        ({"num_seqs": 1, "num_tokens": 1, "max_blocks": 8192}, 49),  # three a multiprocessor
        ({"num_seqs": 8, "num_tokens": 8, "max_blocks": 32}, 8),
        ({"num_seqs": 8, "num_tokens": 8, "max_blocks": 64}, 8),  # one wave, four a multiprocessor
        ({"num_seqs": 4, "num_tokens": 4, "max_blocks": 128}, 16),
        ({"num_seqs": 2, "num_tokens": 2, "max_blocks": 256}, 32),  # a 33rd would get no keys
        ({"num_seqs": 16, "num_tokens": 16, "max_blocks": 128}, 1),  # one a multiprocessor
        ({"num_seqs": 1, "num_tokens": 1, "max_blocks": 1}, 1),
        ({"num_seqs": 1, "num_kv_heads": 1, "max_blocks": 1 << 16}, MAX_SPLITS),
        ({"max_query_len": 8192, "num_tokens": 8192, "num_seqs": 1}, 1),
        ({"max_query_len": 64, "num_tokens": 64, "num_seqs": 1, "max_blocks": 8192}, 16),
    ],
)
def test_splits(sizes, splits):
    assert tiling(call(**sizes), H200).splits == splits


@pytest.mark.parametrize(
    ("sizes", "splits", "warps"),
    [
        ({}, 2, 1),  # eight a multiprocessor
        ({"num_seqs": 256, "num_tokens": 256, "max_blocks": 64}, 1, 1),
        ({"num_seqs": 8, "num_tokens": 8}, 16, 1),
        ({"max_blocks": 1024}, 12, 1),  # as evenly as of all dtypes
        ({"num_seqs": 8, "num_tokens": 8, "max_blocks": 64}, 8, 4),  # too few keys
        ({"max_query_len": 8, "num_tokens": 512}, 1, 2),  # tiles of more rows
    ],
)
@pytest.mark.parametrize("cache_dtype", ["int4", "int8"])
def test_splits_of_integers_with_token_scales(cache_dtype, sizes, splits, warps):
    tiles = tiling(call(**sizes, cache_dtype=cache_dtype, token_scales=True), H200)
    assert (tiles.splits, tiles.program.num_warps) == (splits, warps)


@pytest.mark.parametrize("cache", [{}, {"cache_dtype": "int4", "token_scales": True}], ids=str)
@pytest.mark.parametrize("max_query_len", [1, 8, 64])
@pytest.mark.parametrize("max_blocks", [1, 2, 33, 94, 128, 500, 8192, 1 << 16])
@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5, 8, 12, 64, 100])
def test_of_the_longest_sequence_every_split_has_keys(num_seqs, max_blocks, max_query_len, cache):
    """Those without any start for nothing, and widen the merge to the next power of two."""
    sizes = {"num_seqs": num_seqs, "max_blocks": max_blocks, "max_query_len": max_query_len} | cache
    tiles = tiling(call(num_tokens=num_seqs * max_query_len, **sizes), H200)
    steps = -(-16 * max_blocks // tiles.program.keys)
    share = max(-(-steps // tiles.splits), tiles.min_steps)
    assert (tiles.splits - 1) * share < steps


def test_a_new_cache_or_batch_size_does_not_recompile():
    """What a kernel is compiled for depends on neither: they are scalars, as are the strides."""

    def launch(table_stride=256, **sizes):
        sizes = call(**sizes)
        return attention_launch(sizes, tiling(sizes, H200), table_stride)

    first = launch()
    others = [
        launch(num_blocks=1),
        launch(17, num_blocks=1 << 20),
        launch(num_seqs=65, num_tokens=80),
        launch(max_blocks=200),
    ]
    for other in others:
        assert (other.constants, other.num_warps) == (first.constants, first.num_warps)
        assert other.scalars != first.scalars


@pytest.mark.parametrize(("stride", "unit"), [(128, 16), (24, 8), (7, 1)])
def test_strides_are_counted_in_units(stride, unit):
    query, plane = (32 * stride, stride, 1), (128 * stride, 8 * stride, stride, 1)
    sizes = call(strides=Strides(query, plane, plane))
    launch = attention_launch(sizes, tiling(sizes, H200), 256)
    assert launch.constants["config"].layout.stride_unit == unit
    strides = [*launch.scalars.values()][-10:-2]  # the last two are of scales
    assert [stride * unit for stride in strides] == [*query[:2], *plane[:3], *plane[:3]]


def test_a_grid_has_a_program_for_every_row_to_merge():
    sizes = call(max_blocks=1024)
    launch = merge_launch(sizes, tiling(sizes, H200))
    assert launch.grid == (64 * 32, 1, 1)
    assert launch.constants["SPLITS"] == 16  # of 12


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_call_passes_more_than_twelve_things_by_position(path):
    """Nor hides how many they are, where it calls a kernel or a kernel calls a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            assert len(node.args) <= 12, ast.unparse(node)
            kernel = isinstance(node.func, ast.Subscript)
            assert not (kernel and any(isinstance(arg, ast.Starred) for arg in node.args))


@needs_triton
def test_scalars_are_named_as_the_kernels_name_them():
    """In the same order, which the launcher needs; and none of them is specialised on."""
    from pagedattn._kernels.triton.attention import attention_kernel
    from pagedattn._kernels.triton.merge import merge_kernel

    sizes = call(max_blocks=1024)
    tiles = tiling(sizes, H200)
    launches = attention_launch(sizes, tiles, 256), merge_launch(sizes, tiles)
    kernels = attention_kernel, merge_kernel
    for launch, kernel in zip(launches, kernels, strict=True):
        assert kernel.arg_names[1:] == [*launch.scalars, "results", *launch.constants]
        unspecialised = [param.name for param in kernel.params if param.do_not_specialize]
        assert unspecialised == [*launch.scalars]
    assert (*launches[0].scalars,) == Scalars._fields


@pytest.fixture
def launcher(monkeypatch):
    """A stand-in for jaxlib's, of a machine without a GPU."""
    from pagedattn.backends.triton import program as programs

    launcher = mock.Mock(**{"get_compute_capability.return_value": 90})
    launcher.TritonKernelCall.return_value.to_proto.return_value = b"what it wrote;"
    launcher.create_array_parameter.return_value = "u64"
    launcher.create_scalar_parameter = lambda _, kind: {"i32": "u32", "fp32": "f32"}[kind]
    monkeypatch.setattr(programs, "launcher", launcher)
    programs._capability.cache_clear()
    programs._compiled.cache_clear()
    return launcher


def attending(call: Call):
    """The kernel and what is given to it, in arrays of the call's dtypes."""
    from pagedattn._kernels.triton.attention import attention_kernel

    half, whole, number = (np.zeros(1, dtype) for dtype in (np.float16, np.float32, np.int32))
    plane = half if call.cache_dtype is None else np.zeros(1, held_dtype(call.cache_dtype))
    scale = np.zeros(1, scale_dtype(call.cache_dtype)) if call.token_scales else whole
    beside = whole, number, number, whole, scale, scale, number
    arrays = Arrays(half, plane, plane, *[number] * 3, *beside)
    launch = attention_launch(call, tiling(call, H200), 256)
    return attention_kernel, (arrays,), launch, (Results(half, whole),)


def merging(call: Call):
    from pagedattn._kernels.triton.merge import merge_kernel

    both = (Results(*[np.zeros(1, np.float32)] * 2),)
    return merge_kernel, both, merge_launch(call, tiling(call, H200)), both


@needs_triton
def test_a_program_is_machine_code_without_line_numbers(launcher, monkeypatch):
    """Compiled for a GPU without one; the launcher's message is a stand-in's."""
    from pagedattn.backends.triton import program as programs

    monkeypatch.setattr(programs, "TAKES_BINARIES", True)
    given = merging(call(max_blocks=1024))
    message = zlib.decompress(programs.encoded(*given))
    assert message.startswith(b"what it wrote;")
    assert b"\x7fELF" in message
    assert b".debug_line" not in message
    _, *grid, parameters = launcher.TritonKernelCall.call_args.args
    assert (*grid, len(parameters)) == (*given[2].grid, 6)
    assert launcher.TritonKernel.call_args.args[:3] == ("merge_kernel", given[2].num_warps, 1)


@needs_triton
@pytest.mark.parametrize("kernel", [attending, merging])
def test_parameters_are_those_of_the_program_in_its_order(launcher, monkeypatch, kernel):
    """Of tuples one after another, and all pointers are aligned as XLA's arrays are."""
    from pagedattn.backends.triton import program as programs

    codes = []
    compiled = programs._compiled
    monkeypatch.setattr(programs, "_compiled", lambda *a: codes.append(compiled(*a)) or codes[0])
    programs.encoded(*kernel(call(max_blocks=1024)))
    taken = re.findall(r"\.param \.(\w+) .*_param_\d+", codes[0].asm["ptx"])
    given = launcher.TritonKernelCall.call_args.args[-1]
    assert taken[: len(given)] == given
    assert {*taken[len(given) :]} == {"u64"}  # Triton's own, which the launcher knows
    assert codes[0].asm["ttir"].count("tt.divisibility = 16") == given.count("u64")


@needs_triton
def test_a_kernel_of_ones_own_is_launched_by_xla(launcher):
    """Compiled for a GPU without one; the launcher's message is a stand-in's."""
    from triton_kernels import double_kernel

    x = jnp.zeros((4, 64), jnp.bfloat16)
    outs = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    options = {"outs": outs, "grid": (4, 1, 1), "num_warps": 2, "SIZE": 64}
    program = jax.make_jaxpr(lambda x: triton_call(double_kernel, x, **options))(x)
    assert [out.str_short() for out in program.out_avals] == ["bfloat16[4,64]"]
    assert "triton_kernel_call_ffi" in str(program)
    assert launcher.TritonKernel.call_args.args[:2] == ("double_kernel", 2)
    assert launcher.TritonKernelCall.call_args.args[1:] == (4, 1, 1, ["u64", "u64"])


EIGHT_BITS = [("float8_e4m3fn", False), ("float8_e5m2", False), ("int8", False), ("int8", True)]
LONG = {"max_query_len": 300}


@needs_triton
@pytest.mark.parametrize(
    ("sizes", "cache_dtype", "token_scales"),
    [
        *((s, *kind) for s in ({}, LONG, LATENT_DECODE) for kind in [(None, False), *EIGHT_BITS]),
        *((sizes, "int4", True) for sizes in ({}, LONG)),
    ],
    ids=str,
)
def test_the_attention_kernel_compiles_for_a_gpu(
    launcher, monkeypatch, sizes, cache_dtype, token_scales
):
    """To machine code, without a GPU; the launcher's message is a stand-in's."""
    from pagedattn.backends.triton import program as programs

    monkeypatch.setattr(programs, "TAKES_BINARIES", True)
    options = {"cache_dtype": cache_dtype, "sinks": cache_dtype is not None}
    given = attending(call(**sizes | options, num_tokens=300, token_scales=token_scales))
    assert b"\x7fELF" in zlib.decompress(programs.encoded(*given))
