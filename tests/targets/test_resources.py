"""What the programs of the Triton kernels take of each GPU: `make test-targets`, without a GPU."""

import re
from dataclasses import replace

import jax
import pytest

pytest.importorskip("triton", minversion="3.5")
from calls import Attention, on, started, started_by
from gpus import A_THREAD, GPUS, REGISTERS, taken

from pagedattn import AttentionSpec, BlockSummaries, score_blocks, select_blocks
from pagedattn._dispatch.call import call_of
from pagedattn._kernels.triton.dequantise import Held, dequantise_kernel, dequantise_launch
from pagedattn.backends.triton.program import start

pytestmark = pytest.mark.targets

LATENT = {"latent": True, "head_dim": 576, "value_dim": 512, "num_heads": 128, "num_kv_heads": 1}
CHUNKS = {"num_seqs": 2, "queries": 300}
PREFILL = {"num_seqs": 2, "queries": 4096}
VERIFY = {"queries": 8}
TREES = {"queries": 64, "parents": True}
CAP = AttentionSpec(logits_soft_cap=30.0)
ALL = AttentionSpec(sliding_window=1000, logits_soft_cap=30.0, alibi_slopes=(0.5,) * 32)
BYTES = {"cache_dtype": "int8"}
FLOATS = {"dtype": "float32"}
ALIKE = {"batch_invariant": True}
TOKENS = {"cache_dtype": "int8", "token_scales": True}
FOUR = {"cache_dtype": "int4", "token_scales": True}

CALLS = {
    "decodes": Attention(),
    "split keys": Attention(num_seqs=1, keys=1 << 17),
    "few keys": Attention(num_seqs=8, keys=512),
    "whole sequences": Attention(num_seqs=256, keys=1024),
    "drafts": Attention(**VERIFY),
    "chunks": Attention(**CHUNKS),
    "prefill": Attention(**PREFILL),
    "decodes of 64 in float16": Attention(head_dim=64, dtype="float16"),
    "decodes of 256": Attention(head_dim=256),
    "chunks of 64": Attention(head_dim=64, **CHUNKS),
    "prefill of 256, soft-cap": Attention(head_dim=256, spec=CAP, **PREFILL),
    "keys of 192, values of 128": Attention(head_dim=192, value_dim=128, **PREFILL),
    "odd sizes": Attention(head_dim=80, block_size=12, num_heads=14, num_kv_heads=2),
    "64 heads a KV head": Attention(num_heads=64, num_kv_heads=1),
    "decodes, all options": Attention(spec=ALL, sinks=True),
    "chunks, all options": Attention(spec=ALL, sinks=True, **CHUNKS),
    "decodes of int8": Attention(**BYTES),
    "decodes of e4m3": Attention(cache_dtype="float8_e4m3fn"),
    "decodes of e5m2": Attention(cache_dtype="float8_e5m2"),
    "chunks of int8": Attention(**BYTES, **CHUNKS),
    "decodes of int8, per-token scales": Attention(**TOKENS),
    "few keys of int8, per-token scales": Attention(num_seqs=8, keys=512, **TOKENS),
    "chunks of int8, per-token scales": Attention(**TOKENS, **CHUNKS),
    "decodes of int4": Attention(**FOUR),
    "decodes of int4, group of 8, all options": Attention(
        num_heads=64, sinks=True, spec=replace(CAP, sliding_window=1000), **FOUR
    ),
    "few keys of int4": Attention(num_seqs=1, keys=512, **FOUR),
    "latents": Attention(**LATENT),
    "latents, prefill": Attention(**LATENT, **PREFILL),
    "latents of int8": Attention(**LATENT, **BYTES),
    "latents of int8, per-token scales": Attention(**LATENT, **TOKENS),
    "512 columns": Attention(head_dim=512, **VERIFY),
    "576 and 512 columns": Attention(head_dim=576, value_dim=512, **CHUNKS),
    "float32": Attention(**FLOATS),
    "float32, chunks": Attention(**FLOATS, **CHUNKS),
    "float32 of 256": Attention(head_dim=256, **FLOATS, **VERIFY),
    "float32, int8": Attention(**FLOATS, **BYTES, **VERIFY),
    "float32, int4": Attention(**FLOATS, **FOUR, **VERIFY),
    "float32, latents": Attention(**LATENT, **FLOATS),
    "drafts that branch": Attention(parents=True, **VERIFY),
    "drafts that branch, all options": Attention(spec=ALL, sinks=True, parents=True, **VERIFY),
    "drafts that branch, int8": Attention(parents=True, **VERIFY, **BYTES),
    "trees of 64": Attention(**TREES),
    "trees of 64, all options": Attention(spec=ALL, sinks=True, **TREES),
    "trees of 64, latents": Attention(**LATENT, **TREES),
    "trees of 64, 256 columns": Attention(head_dim=256, **TREES),
    "trees of 300, float32": Attention(parents=True, **FLOATS, **CHUNKS),
    "chosen blocks": Attention(num_seqs=16, keys=1 << 17, chosen=1024),
    "chosen blocks of 128": Attention(num_seqs=16, keys=1 << 17, chosen=128, block_size=128),
    "chosen blocks, all options": Attention(spec=ALL, sinks=True, chosen=64),
    "chosen blocks, chunks": Attention(chosen=16, **CHUNKS),
    "chosen blocks of int8": Attention(chosen=64, **BYTES),
    "chosen blocks, invariant": Attention(chosen=64, **ALIKE),
    "decodes, invariant": Attention(**ALIKE),
    "split keys, invariant": Attention(num_seqs=1, keys=1 << 17, **ALIKE),
    "prefill, invariant": Attention(**ALIKE, **PREFILL),
    "chunks, all options, invariant": Attention(spec=ALL, sinks=True, **ALIKE, **CHUNKS),
    "decodes of int8, invariant": Attention(num_seqs=8, **ALIKE, **BYTES),
    "chunks of int8, invariant": Attention(**ALIKE, **BYTES, **CHUNKS),
    "decodes of int8, per-token scales, invariant": Attention(num_seqs=8, **ALIKE, **TOKENS),
    "latents of int8, per-token scales, invariant": Attention(**LATENT, **ALIKE, **TOKENS),
    "latents, invariant": Attention(**LATENT, **ALIKE),
    "latents, prefill, invariant": Attention(**LATENT, **ALIKE, **PREFILL),
    "256 columns, invariant": Attention(head_dim=256, **ALIKE, **CHUNKS),
    "float32, invariant": Attention(**FLOATS, **ALIKE, **CHUNKS),
}


# GPUs without instructions for this dtype; test_refusals.py says what is refused.
REFUSED = {"decodes of e4m3": {"A100", "A10"}}
RUN = [(gpu, name) for name in CALLS for gpu in GPUS if gpu not in REFUSED.get(name, ())]
# An L4 has the memory, registers and products of an A10: what it has beside them is float8_e4m3fn.
RUN = [(gpu, name) for gpu, name in RUN if gpu != "L4" or CALLS[name].cache_dtype]
INVARIANT = [(gpu, name) for gpu, name in RUN if CALLS[name].batch_invariant]
# Without a rounding of their own, CUDA's assembler may fuse them; what Triton has fused is `fma`.
MAY_BE_FUSED = re.compile(r"\b(?:mul|add|sub)(?:\.ftz)?\.f32\b.*")


def spills(gpu: str, call: Attention) -> int:
    """Bytes that a thread may spill, as measured: more is a program that has grown by mistake."""
    if call.dtype == "float32":
        return 400  # no tensor cores: threads multiply, and hold both operands
    if call.parents and gpu in ("H200", "A100"):
        return 560  # masks of lines, for the last few steps of keys
    if gpu == "H200":
        return 400  # rows and warps were measured there, with what they spill
    if call.batch_invariant:
        return 320  # a sum of a row's columns: that of segments before, used once in 512 keys
    if call.token_scales:
        return 96  # scales of a step's keys, and their exponents
    if call.head_dim > 128:
        # Sums of 256 columns and more fill the registers by themselves.
        return 272 if call.parents else 240
    return 32  # a few addresses


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("few", [False, True], ids=["alike", "eight bits"])
def test_the_choice_of_blocks_fits(gpu, few, dtype):
    """One program for the scores of long tables, and one for the choice; nothing is spilled.

    XLA computes scores in eight bits for the older GPUs, on which Triton does not read them.
    """
    query, _, batch, *_ = Attention(num_seqs=16, keys=1 << 17, dtype=dtype).arrays()
    plane = jax.ShapeDtypeStruct((16 << 13, 8, 128), "float8_e4m3fn" if few else dtype)

    def choose(query, batch, *planes):
        scores = score_blocks(query, BlockSummaries(planes), batch)
        return select_blocks(scores, batch, 1024)

    with on(GPUS[gpu]):
        programs = started_by(choose, query, batch, plane, plane)
    by_xla = few and GPUS[gpu].capability < (8, 9)
    names = ["choice_kernel"] if by_xla else ["scores_kernel", "choice_kernel"]
    assert [program.metadata.name for program in programs] == names
    for program in programs:
        took = taken(program)
        print("TOOK", gpu, program.metadata.name, program.metadata.num_warps, took)
        assert took.shared <= GPUS[gpu].kilobytes << 10
        assert took.registers * took.threads <= REGISTERS
        assert took.spilled <= spills(gpu, Attention(dtype=dtype))


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("cache_dtype", ["int4", "int8", "float8_e4m3fn"])
def test_what_dequantises_fits(gpu, cache_dtype):
    """With loads and stores of several elements, and nothing spilled."""
    if cache_dtype == "float8_e4m3fn" and GPUS[gpu].capability < (8, 9):
        pytest.skip("has no instruction for it")
    query, cache, batch, *_ = Attention(cache_dtype=cache_dtype, token_scales=True).arrays()

    def dequantise(query, cache, batch):
        call = call_of(query, cache, batch, AttentionSpec())
        launch = dequantise_launch(call, "key", batch.max_blocks)
        held = Held(cache.key, cache.key_scale, batch.block_tables, batch.seq_lens)
        out = jax.ShapeDtypeStruct((call.num_seqs * call.max_blocks, 16, 8, 128), query.dtype)
        return start(dequantise_kernel, (held,), launch, (out,))

    with on(GPUS[gpu]):
        (program,) = started_by(dequantise, query, cache, batch)
    took = taken(program)
    assert took.registers * took.threads <= REGISTERS
    assert took.spilled == 0
    wide = r"st\.global\.v4\.b32" if cache_dtype != "int4" else r"st\.global\.v\d\.b"
    assert re.search(r"ld\.global\.v\d\.b32", program.asm["ptx"])
    assert re.search(wide, program.asm["ptx"])


@pytest.mark.parametrize(("gpu", "name"), RUN)
def test_programs_fit(gpu, name):
    call = CALLS[name]
    with on(GPUS[gpu]):
        programs, held = started(call)
    for program in programs:
        took = taken(program)
        print("TOOK", gpu, name, program.metadata.name, program.metadata.num_warps, took, held)
        assert took.shared <= GPUS[gpu].kilobytes << 10
        assert took.columns <= GPUS[gpu].tensor_columns
        assert took.registers <= A_THREAD
        assert took.registers * took.threads <= REGISTERS
        assert took.spilled <= spills(gpu, call)
    assert taken(programs[0]).shared <= held, "the launch chooses by this number"


@pytest.mark.parametrize(("gpu", "name"), INVARIANT)
def test_only_what_is_written_is_fused_where_bits_are_promised(gpu, name):
    """A maximum times the scale, say, less another: in one loop it was fused, in another not."""
    with on(GPUS[gpu]):
        programs, _ = started(CALLS[name])
    for program in programs:
        assert not MAY_BE_FUSED.findall(program.asm["ptx"]), program.metadata.name
