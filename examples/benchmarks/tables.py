"""The tables of the docs' figures, written from the reports.

    PYTHONPATH=examples python -m benchmarks.tables docs/performance.md docs/scale.md

A table stands below the name of its report, `<!-- h200.json -->`, and ends where a line is empty. A
second table of a report has a name behind it: `<!-- cpu.json, layers -->`.
"""

import argparse
import json
import re
from pathlib import Path

from benchmarks.report import SUM_OR_PRODUCT

GPU_COLUMNS = {
    "`None`": ["backend=None, jax.jit"],
    "`mosaic`": ["mosaic, jax.jit"],
    "`triton`": ["triton, torch graph"],
    "FA3": ["FlashAttention-3"],
    "FA3, 128": ["FlashAttention-3, block 128"],
    "FA4": ["FlashAttention-4"],
    "FA4, 128": ["FlashAttention-4, block 128"],
    "Flash Infer": ["FlashInfer decode", "FlashInfer prefill"],
    "JAX Pallas": ["JAX Pallas"],
    "gather, cuDNN": ["JAX gather + cuDNN", "torch gather + SDPA"],
    "cuDNN, no pages": ["JAX cuDNN, dense", "torch SDPA cuDNN, dense"],
}
GPU_ROWS = {
    "decode 64 x 4096": "decode 64x4096",
    "decode 1 x 131072": "decode 1x131072",
    "decode 256 x 1024": "decode 256x1024",
    "decode 56 x 256 + 8 x 16384": "decode skewed",
    "decode 8 x 512": "decode 8x512",
    "verify 64 x (8 on 4096)": "verify 64x(8 on 4096)",
    "prefill 2 x 8192": "prefill 2x8192",
    "prefill 8 x 2048": "prefill 8x2048",
    "chunk 64 x (128 on 4096)": "chunk 64x(128 on 4096)",
    "mixed 2 x 4096 + 62 x (1 on 4095)": "mixed 2x4096 + 62x(1 on 4095)",
    "decode 64 x (512 to 4096)": "decode 64x(512 to 4096)",
    "decode 40 x (512 to 4096)": "decode 40x(512 to 4096)",
    "decode 256 x (512 to 1536)": "decode 256x(512 to 1536)",
    "decode 40 x 4096": "decode 40x4096",
    "decode 256 x 1036": "decode 256x1036",
    "decode 8 x 1024": "decode 8x1024",
    "decode 4 x 2048": "decode 4x2048",
    "decode 2 x 4096": "decode 2x4096",
    "decode 1 x 1024": "decode 1x1024",
    "verify 8 x (8 on 4096)": "verify 8x(8 on 4096)",
    "verify 64 x (2 on 4096)": "verify 64x(2 on 4096)",
}
GPU_ROWS |= {
    f"{title}, blocks of 128": f"{case}, block 128"
    for title, case in {
        **GPU_ROWS,
        "prefill 1 x 32768": "prefill 1x32768",
        "chunk 1 x (2048 on 32768)": "chunk 1x(2048 on 32768)",
    }.items()
}
EQUAL = list(GPU_ROWS.values())[:10]
IN_MICROSECONDS = (
    *("decode 8x512", "decode 8x1024", "decode 4x2048", "decode 2x4096", "decode 1x1024"),
    *("verify 64x(8 on 4096)", "verify 64x(2 on 4096)", "verify 8x(8 on 4096)"),
    "mixed 2x4096 + 62x(1 on 4095)",
)
LATENTS = {
    "mosaic": "`mosaic`",
    "FlashMLA": "FlashMLA",
    "triton": "`triton`",
    "mosaic, float8_e4m3fn": "`mosaic`, float8",
    "triton, float8_e4m3fn": "`triton`, float8",
}
DENSE = "torch SDPA, dense"
FROM_TORCH = "numba, torch", "sdpa, torch"  # much the same as from JAX


def lengths_table(data: dict) -> list[str]:
    """The cases that the table of other lengths does not have."""
    cases = {name: row for name, row in data["cases"].items() if name not in EQUAL}
    return gpu_table(data | {"cases": cases})


def gpu_table(data: dict) -> list[str]:
    """The best of each kind of contender that ran, in units of the machine."""
    cases = {title: case for title, case in GPU_ROWS.items() if case in data["cases"]}
    times = [data["cases"][case]["us"] for case in cases.values()]
    columns = {
        c: names for c, names in GPU_COLUMNS.items() if any(_best(us, names) for us in times)
    }
    lines = _head(list(columns))
    for title, case in cases.items():
        row = data["cases"][case]
        bests = (_best(row["us"], names) for names in columns.values())
        lines.append(_line([title, *(_figure(case, row, us) if us else "" for us in bests)]))
    return lines


def cpu_table(data: dict) -> list[str]:
    """Times relative to the dense kernel's: bfloat16 in blocks of 16."""
    suffix = ", bfloat16, block 16"
    rows = {name: row["us"] for name, row in data["cases"].items() if name.endswith(suffix)}
    left_out = {DENSE, *FROM_TORCH}
    names = list(dict.fromkeys(name for us in rows.values() for name in us if name not in left_out))
    lines = _head(names)
    for case, us in rows.items():
        ratios = (_three(us[name] / us[DENSE]) if us.get(name) else "" for name in names)
        lines.append(_line([case.removesuffix(suffix), *ratios]))
    return lines


def threads_table(data: dict) -> list[str]:
    """Shares of torch's rate on as many threads, and all threads' rate over one's."""
    counts = list(next(iter(data["us"].values()))[SUM_OR_PRODUCT])
    lines = _head([f"{n} threads" if n != "1" else "1 thread" for n in counts] + ["all / one"])
    for case, us in data["us"].items():
        ours = us["numba, jax.jit"]
        shares = (f"{us[SUM_OR_PRODUCT][n] / ours[n]:.2f}" for n in counts)
        lines.append(_line([case, *shares, f"{ours['1'] / ours[counts[-1]]:.1f}"]))
    return lines


def layers_table(data: dict) -> list[str]:
    """us of a layer by dtype of the cache, and of the sums."""
    rows = data["us_of_a_layer"]
    names = list(next(iter(rows.values())))
    lines = _head(names)
    for shape, us in rows.items():
        for threads in sorted(us[names[0]], reverse=True):
            figures = (f"{us[name][threads]:.0f}" for name in names)
            lines.append(_line([f"{shape}, threads: {threads}", *figures]))
    return lines


def caches_table(data: dict) -> list[str]:
    """Times of each kind of cache over bfloat16's."""
    shapes = data["us"]
    kinds = [kind for kind in next(iter(shapes.values())) if kind != "bfloat16"]
    lines = _head(list(shapes))
    for kind in kinds:
        lines.append(_line([kind, *(f"{us[kind] / us['bfloat16']:.2f}" for us in shapes.values())]))
    return lines


def options_table(data: dict) -> list[str]:
    """us of each kind of work, and the rate at which it reads what it must."""
    lines = _head(["us", "TB/s"])
    for name, row in data["work"].items():
        if "microseconds" in row:
            us = row["microseconds"]
            lines.append(_line([name, f"{us:.1f}", f"{row['read'] / us / 1e6:.2f}"]))
    return lines


def long_queries_table(data: dict) -> list[str]:
    """us of long queries by what a cache holds, and their rate as a share of bfloat16's."""
    work = {name: row["microseconds"] for name, row in data["work"].items()}
    shapes = [name for name in work if not any(name.startswith(f"{other}, ") for other in work)]
    kinds = [name.removeprefix(shapes[0]) for name in work if name.startswith(shapes[0])]
    lines = _head([column for shape in shapes for column in (shape, "of bfloat16's rate")])
    for kind in kinds:
        times = {shape: work[f"{shape}{kind}"] for shape in shapes}
        cells = [(f"{us:.0f}", f"{work[shape] / us:.2f}") for shape, us in times.items()]
        title = kind.removeprefix(", ").replace("triton", "`triton`") or "bfloat16"
        lines.append(_line([title, *(cell for pair in cells for cell in pair)]))
    return lines


def bits_table(data: dict) -> list[str]:
    """us from caches of fewer bits: decodes, and long queries by what is chosen and by Triton."""
    work = data["work"]
    kinds = [name.removeprefix("decode") for name in work if name.startswith("decode")]
    shapes = "decode", "prompts, 2 x 8192", "chunks, 128 on 4096"
    lines = _head([*shapes, *(f"{shape}, `triton`" for shape in shapes[1:])])
    for kind in kinds:
        if f"{shapes[1]}{kind}" in work:
            names = [f"{shape}{kind}" for shape in shapes]
            names += [f"{name}, triton" for name in names[1:]]
            title = kind.removeprefix(", ") or "bfloat16"
            lines.append(_line([title, *(_us(work, name) for name in names)]))
    return lines


def latents_table(data: dict) -> list[str]:
    """us of decodes over latent caches, by contender."""
    work = data["work"]
    shapes = [name.removesuffix(", mosaic") for name in work if name.endswith(", mosaic")]
    contenders = [name for name in LATENTS if any(f"{shape}, {name}" in work for shape in shapes)]
    lines = _head([LATENTS[name] for name in contenders])
    for shape in shapes:
        title = shape.removeprefix("latent cache").removeprefix(", ") or "64 x 4096, 128 heads"
        lines.append(_line([title, *(_us(work, f"{shape}, {name}") for name in contenders)]))
    return lines


def _us(work: dict, name: str) -> str:
    us = work.get(name, {}).get("microseconds")
    return f"{us:.0f}" if us else ""


def steps_table(data: dict) -> list[str]:
    """Whole decode steps: ms, tokens, and the shares of a copy's speed and of the roofline."""
    lines = _head(["ms a step", "tokens/s", "share of a copy", "share of the roofline"])
    for row in data["cases"]:
        case = row["case"].replace("x", " x ")
        shares = (f"{row[name]:.2f}" for name in ("share", "of_roofline"))
        lines.append(_line([case, f"{row['ms']:.2f}", f"{row['tokens_s']:.0f}", *shares]))
    return lines


def devices_table(data: dict) -> list[str]:
    """The same work on one device and on all."""
    lines = _head(["one", "two", "speedup"])
    for name, seconds in data["seconds"].items():
        one, both = seconds["one"], seconds["all"]
        times = (f"{1e3 * t:.2f} ms" if t > 1e-3 else f"{1e6 * t:.1f} us" for t in (one, both))
        lines.append(_line([name, *times, f"{one / both:.2f}"]))
    return lines


TABLES = {
    "h200.json": gpu_table,
    "h200_lengths.json": lengths_table,
    "h100.json": gpu_table,
    "h100_lengths.json": lengths_table,
    "h100_caches.json": bits_table,
    "h100_latents.json": latents_table,
    "h100_whole_step.json": steps_table,
    "h200_options.json": options_table,
    "h200_caches.json": options_table,
    "h200_caches_prompts.json": long_queries_table,
    "h200_caches_chunks.json": long_queries_table,
    "h200_latents.json": latents_table,
    "h200_latents_float8.json": latents_table,
    "h200_whole_step.json": steps_table,
    "h200_devices.json": devices_table,
    "cpu.json": cpu_table,
    "cpu_amx.json": cpu_table,
    "cpu_avx2.json": cpu_table,
    "cpu.json, layers": layers_table,
    "cpu_threads.json": threads_table,
    "cpu_threads_prompts.json": threads_table,
    "cpu_caches.json": caches_table,
    "cpu_caches_amx.json": caches_table,
    "cpu_caches_avx2.json": caches_table,
}


def rewritten(page: str, results: Path) -> str:
    """The page with its tables made anew from the reports in a folder."""
    for name, table in TABLES.items():
        report = results / name.partition(",")[0]
        lines = "\n".join(table(json.loads(report.read_text())))
        page = re.sub(rf"(<!-- {name} -->\n\n).*?(?=\n\n)", rf"\g<1>{lines}", page, flags=re.DOTALL)
    return page


def _best(us: dict[str, float | None], names: list[str]) -> float | None:
    return min((time for name in names if (time := us.get(name))), default=None)


def _figure(case: str, row: dict, us: float) -> str:
    if case.removesuffix(", block 128") in IN_MICROSECONDS:
        return f"{us:.1f} us" if us < 100 else f"{us:.0f} us"
    return (
        f"{row['kv_bytes'] / us / 1e6:.2f}" if row["decode"] else f"{row['flops'] / us / 1e6:.0f}"
    )


def _three(number: float) -> str:
    """Three digits, or as many as are before the point."""
    return f"{number:.{max(0, 3 - len(str(int(number))))}f}"


def _head(columns: list[str]) -> list[str]:
    return [_line(["", *columns]), "|" + "---|" * (len(columns) + 1)]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="+", type=Path, help="which are rewritten in place")
    for path in parser.parse_args().pages:
        path.write_text(rewritten(path.read_text(), path.parent / "results"))
