"""The figures in the prose of the pages: those of the committed reports.

Each assertion makes a phrase of the figures, and looks for it on its page.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
BENCHMARKS = DOCS.parent / "examples/benchmarks"
NONE, FA3, FA4 = "backend=None, jax.jit", "FlashAttention-3", "FlashAttention-4"
FA3_128, FA4_128 = f"{FA3}, block 128", f"{FA4}, block 128"
EQUAL = "decode 64x4096", "decode 1x131072", "decode 256x1024"
LARGE = *EQUAL, "decode skewed"  # batches or contexts
LENGTHS = (
    *("decode 64x(512 to 4096)", "decode 40x(512 to 4096)", "decode 256x(512 to 1536)"),
    *("decode 40x4096", "decode 256x1036"),
)
SMALL = "decode 8x1024", "decode 4x2048", "decode 2x4096"
PROMPTS = "prefill", "chunk", "mixed"
VLLM = "vLLM", "vLLM, block 32"


def page(name: str) -> str:
    """The text of a page, each row or paragraph on one line."""
    return " ".join((DOCS / name).read_text().split())


def report(name: str) -> dict:
    return json.loads((DOCS / "results" / name).read_text())


def times(name: str) -> dict[str, dict[str, float]]:
    """Microseconds of each contender, by case."""
    return {case: row["us"] for case, row in report(name)["cases"].items()}


def work(name: str) -> dict[str, float]:
    """Microseconds of each kind of work that was not refused."""
    rows = report(name)["work"].items()
    return {kind: row["microseconds"] for kind, row in rows if "microseconds" in row}


def percent(us: float, of: float) -> int:
    """By how many % one time is longer than another."""
    return round(100 * (us / of - 1))


def faster(name: str, cases: Iterable[str], peer: str = FA3) -> list[int]:
    """By how many % `backend=None` is faster: the peer's time is so much longer."""
    us = times(name)
    return [percent(us[case][peer], us[case][NONE]) for case in cases]


def slower(name: str, case: str, peer: str = FA3, ours: str = NONE) -> int:
    """By how many % the peer is faster."""
    us = times(name)[case]
    return percent(us[ours], us[peer])


def long_queries(name: str) -> list[str]:
    return [case for case in times(name) if case.startswith(PROMPTS)]


def span(numbers: Iterable[float], form: str = "") -> str:
    numbers = sorted(numbers)
    return f"{numbers[0]:{form}} to {numbers[-1]:{form}}"


def bandwidths(name: str, cases: Iterable[str]) -> list[float]:
    rows = report(name)["cases"]
    return [rows[case]["kv_bytes"] / rows[case]["us"][NONE] / 1e6 for case in cases]


def on_a_cpu(name: str, kinds: str | tuple[str, ...], peers: tuple[str, ...]) -> list[float]:
    """How many times as fast as the best of the peers, in bfloat16 and blocks of 16."""
    us = times(name)
    cases = [c for c in us if c.startswith(kinds) and c.endswith(", bfloat16, block 16")]
    return [min(us[case][peer] for peer in peers) / us[case][NONE] for case in cases]


def test_decode_on_an_h200():
    text = page("performance.md")
    rates = bandwidths("h200.json", LARGE) + bandwidths("h200_lengths.json", (*LARGE, *LENGTHS))
    assert f"{span(rates, '.1f')} TB/s at large batches or contexts" in text
    gains = faster("h200_lengths.json", (*LARGE, *LENGTHS))
    assert f"[{span(gains)} % faster](#decode-of-different-lengths) than FlashAttention-3" in text
    ratios = [
        times("h200.json")[case]["FlashInfer decode"] / times("h200.json")[case][NONE]
        for case in LARGE
    ]
    assert f"[{span(ratios, '.1f')} times](#one-h200) as fast as FlashInfer" in text


def test_long_queries_on_an_h200():
    cases, text = long_queries("h200.json"), page("performance.md")
    assert f"[{span(faster('h200.json', cases))} % faster](#one-h200) than FlashAttention-3" in text
    assert f"{span(faster('h200.json', cases, FA4))} % than FlashAttention-4" in text


def test_what_mosaic_gains_by_the_rule_of_today():
    us = times("h200.json")
    gains = [
        percent(us[c][NONE], us[c]["mosaic, jax.jit"]) for c in ("decode 64x4096", "decode skewed")
    ]
    assert f"which is {gains[0]} and {gains[1]} % faster in this run" in page("performance.md")


def test_where_others_are_faster_on_an_h200():
    text = page("performance.md")
    assert f"by {slower('h200_lengths.json', 'decode 2x4096')} %, and by an older rule" in text
    equal, mixed = (slower("h200.json", case) for case in ("decode 64x4096", "decode skewed"))
    assert f"(#one-h200) by {equal} % and mixed lengths by {mixed} %" in text
    small = max(slower("h200_lengths.json", case, FA3_128) for case in SMALL)
    assert f"FlashAttention-3 in small decodes by up to {small} %" in text
    equal, mixed = (
        slower("h200.json", case, FA3_128) for case in ("decode 64x4096", "decode skewed")
    )
    assert f"at 64 x 4096 by {equal} % and mixed lengths by {mixed} %" in text
    (long,) = {slower("h200.json", "prefill 2x8192", peer) for peer in (FA3_128, FA4_128)}
    assert f"it and FlashAttention-4 at prefill 2 x 8192 by {long} %" in text
    dense = [slower("h200.json", case, "JAX cuDNN, dense") for case in (*EQUAL, "decode 8x512")]
    assert f"cuDNN in decodes of equal lengths by {span(dense)} %" in text


def test_decode_on_an_h100():
    text = page("performance.md")
    rates = bandwidths("h100.json", LARGE) + bandwidths("h100_lengths.json", (*LARGE, *LENGTHS))
    assert f"[decode](h100.md) {span(rates, '.1f')} TB/s" in text
    gains = faster("h100.json", LARGE) + faster("h100_lengths.json", (*LARGE, *LENGTHS))
    assert f"within {max(map(abs, gains))} % of FlashAttention-3" in text
    gains = faster("h100.json", LARGE)
    assert f"large decodes are within {max(map(abs, gains))} % of it" in page("h100.md")


def test_long_queries_on_an_h100():
    gains = span(faster("h100.json", long_queries("h100.json")))
    assert f"prefill, chunks and mixed batches {gains} % faster" in page("performance.md")
    assert f"by {gains} % beside FlashAttention-3" in page("h100.md")
    us = times("h100.json")["prefill 2x8192"]
    (less,) = {-percent(us[peer], us[NONE]) for peer in (FA3_128, FA4_128)}
    assert f"FlashAttention-3 and 4 take {less} % less time at prefill" in page("h100.md")


def test_where_flash_attention_3_is_faster_on_an_h100():
    text, name = page("h100.md"), "h100_lengths.json"
    assert f"at 40 x 4096 ({slower(name, 'decode 40x4096')} %)" in text
    assert f"40 x (512 to 4096) ({slower(name, 'decode 40x(512 to 4096)')} %)" in text
    short = "verify 64x(2 on 4096)", "verify 8x(8 on 4096)"
    verify = span(slower(name, case) for case in short)
    verify_128 = max(slower(name, case, FA3_128) for case in short)
    assert f"in verification ({verify} %, in blocks of 128 to {verify_128} %)" in text
    mixed = slower(name, "decode 256x(512 to 1536)", FA3_128)
    assert f"in its blocks of 128 at 256 x (512 to 1536) ({mixed} %)" in text
    prompt = slower(name, "prefill 1x32768, block 128")
    chunk = slower(name, "chunk 1x(2048 on 32768), block 128")
    assert f"prefill 1 x 32768 ({prompt} %) and its chunk ({chunk} %)" in text

    dense = span(slower("h100.json", case, "JAX cuDNN, dense") for case in EQUAL)
    summary = page("performance.md")
    assert (
        f"by {slower(name, 'decode 40x4096')} %, in verification by up to {verify[-1]} %" in summary
    )
    assert f"or {verify_128} % in blocks of 128; both in blocks of 128, at prefill" in summary
    assert f"prefill 1 x 32768 by {prompt} %" in summary
    assert f"in large decodes of equal lengths by {dense} %" in summary


def test_decodes_whose_results_lie_at_new_addresses():
    text, graph = page("performance.md"), "triton, torch graph"
    short = times("h100_lengths.json")["decode 1x1024, block 128"]
    assert f"took {short[NONE]:.1f} us instead of {short[graph]:.1f}" in text
    assert f"(FlashAttention-3: {short[FA3]:.1f};" in text
    assert f"up to {short[NONE] / short[graph]:.1f} times as long as in a CUDA graph" in text
    small = times("h100.json")["decode 8x512"]
    figures = f"took {small[NONE]:.1f} instead of {small[graph]:.1f} ({small[FA3]:.1f};"
    assert figures in text
    assert f"same run has {small['triton, jax.jit']:.1f} us" in page("h100.md")


def test_eight_bits_on_gpus():
    us = work("h200_options.json")
    ratio = us["decode"] / us["decode, float8_e4m3fn"]
    assert f"decode [{ratio:.2f} times](#options) as fast" in page("performance.md")
    us, text = work("h100_caches.json"), page("h100.md")
    plain = us["decode, float8_e4m3fn"]
    kinds = "float8_e4m3fn", "int8"
    one, other = (f"{us[f'decode, {kind}, per-token scales'] / plain:.2f}" for kind in kinds)
    assert f"with per-token scales takes {one} to {other} times as long" in text
    assert f"from int4 {us['decode, int4'] / plain:.2f}" in text


MANY = ", 128 x 1024, 128 heads", ", 16 x 8192, 128 heads"


def test_latent_caches():
    us, text = work("h100_latents.json"), page("h100.md")
    shapes = [name.removesuffix(", mosaic") for name in us if name.endswith("mosaic")]
    less = [-percent(us[f"{shape}, mosaic"], us[f"{shape}, FlashMLA"]) for shape in shapes]
    assert f"takes {span(less)} % less time than FlashMLA" in text
    us = work("h100_options.json")
    many, few = us["latent cache, triton"], us["latent cache, 64 x 4096, 16 heads, triton"]
    assert f"takes {many:.0f} with 128 heads and {few:.0f} with 16" in text
    assert f"128 heads {us['latent cache, triton, float8_e4m3fn']:.0f}" in text

    us = work("h100_latents_float8.json")
    shapes = "64 x 4096, 16", "128 x 1024, 16", "16 x 8192, 16", "64 x 4096, 32"
    names = [f"latent cache, {shape} heads, mosaic" for shape in shapes]
    one, same, long, more = (f"{us[f'{name}, float8_e4m3fn'] / us[name]:.2f}" for name in names)
    assert one == same
    assert f"takes {one} of its time from bfloat16" in text
    assert f"{long} for 16 x 8192, and {more} for 64 x 4096 with 32 heads" in text

    us, text = work("h200_latents_float8.json"), " ".join(page("performance.md").split())

    def of_bfloat16(shape):
        name = f"latent cache{shape}, mosaic"
        return f"{us[f'{name}, float8_e4m3fn'] / us[name]:.2f}"

    one, short, long = (
        of_bfloat16(f", {keys}, 16 heads") for keys in ("64 x 4096", "128 x 1024", "16 x 8192")
    )
    assert f"takes {one} of its time from bfloat16, {short} for 128 x 1024 and {long} for" in text
    some, more = (of_bfloat16(f", 64 x 4096, {heads} heads") for heads in (32, 64))
    assert f"With 32 heads it takes {some}, with 64 heads {more}, with 128 heads" in text
    most = sorted(of_bfloat16(shape) for shape in ("", *MANY))
    assert f"with 128 heads {most[0]} to {most[-1]}:" in text


def test_the_rate_of_matmuls_over_latents():
    """The matmuls with keys and with values, beside a large one under load."""
    operations = 2 * 64 * 4096 * 128 * (576 + 512)
    us = work("h200_options.json")["latent cache, mosaic"]
    rate = operations / us / 1e6
    share = rate / report("h200.json")["machine"]["matmul_tflop_s"]
    text = page("experiments.md")
    assert f"are {operations / 1e9:.0f} GFLOP. `mosaic` takes {us:.1f} us" in text
    assert f"which is {rate:.0f} TFLOP/s, {share:.2f} of a large matmul" in text


def test_decode_steps_and_devices():
    shares = [
        case["share"]
        for name in ("", "_other", "_cublas")
        for case in report(f"h200_whole_step{name}.json")["cases"]
    ]
    text = page("performance.md")
    assert f"[{span(shares, '.2f')}](#whole-steps-the-engine-two-gpus)" in text
    step = report("h200_devices.json")["seconds"]["decode loop, 64 x 4096"]
    assert f"two GPUs are {step['one'] / step['all']:.2f} times as fast" in text


def test_the_engine():
    found, text = report("h200_serving.json"), page("performance.md")
    assert f"gives {found['full']['engine_tokens_s']:.0f} tokens a second" in text
    a, b, c = (f"{load['first_p50_ms']:.0f}" for load in found["loads"])
    assert f"wait {a}, {b} and {c} ms for the first token" in text
    a, b, c = (f"{load['between_p50_ms']:.1f}" for load in found["loads"])
    assert f"and {a}, {b} and {c} ms for each further one" in text
    rate = report("h100_serving.json")["full"]["engine_tokens_s"]
    assert f"gives {rate:.0f} tokens a second" in page("h100.md")


def test_a_cpu_with_avx512():
    text = page("performance.md")
    decode, ipex = (on_a_cpu("cpu.json", "decode", peers) for peers in (VLLM, ("IPEX",)))
    assert (
        f"[decode](#a-cpu) {min(decode):.2f} to {max(decode):.1f} times as fast as vLLM's" in text
    )
    assert f"{span(ipex, '.1f')} times as fast as IPEX" in text
    long = span(on_a_cpu("cpu.json", PROMPTS, VLLM), ".1f")
    assert f"IPEX; prefill, chunks and mixed batches {long} times as fast as vLLM's" in text


def test_a_cpu_with_avx2():
    text, name = page("performance.md"), "cpu_avx2.json"
    decode, long = (span(on_a_cpu(name, kind, VLLM), ".1f") for kind in ("decode", PROMPTS))
    assert f"[decode](#avx2) {decode} times, prefill, chunks and mixed batches {long} times" in text


def test_a_cpu_with_amx():
    text, dense = page("performance.md"), ("torch SDPA, dense",)
    decode, long = (
        span(on_a_cpu("cpu_amx.json", kind, dense), ".1f") for kind in ("decode", PROMPTS)
    )
    assert f"[decode](#amx) {decode} times, prefill, chunks and mixed batches {long} times" in text


def test_int8_on_a_cpu():
    decodes = [us for case, us in report("cpu_caches.json")["us"].items() if "decode" in case]
    plain = span((us["bfloat16"] / us["int8"] for us in decodes), ".2f")
    scaled = span((us["bfloat16"] / us["int8, per-token scales"] for us in decodes), ".2f")
    text = page("performance.md")
    assert f"[{plain} times](#caches-of-fewer-bits), with per-token scales {scaled} times" in text


def test_every_script_is_named():
    """But the worker of `benchmarks.releases`, which that starts."""
    files = [*BENCHMARKS.glob("*.py"), *BENCHMARKS.glob("*/__main__.py")]
    scripts = {
        file.parent.name if file.stem == "__main__" else file.stem
        for file in files
        if file.stem == "__main__" or "__main__" in file.read_text()
    }
    named = re.findall(r"`(?:benchmarks\.)?(\w+)", page("performance.md"))
    assert scripts - set(named) == {"releases_worker"}
