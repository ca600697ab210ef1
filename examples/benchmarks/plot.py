"""The pictures of the reports, each for light pages and for dark ones; the same report, same bytes.

`PYTHONPATH=examples python -m benchmarks.plot docs/results` draws those of the committed reports.
"""

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from benchmarks.report import SUM

OURS = "pagedattn"
GREY = "#8a8a8a"  # legible on white and on black
RED = "#e4572e"
LOOKS = {"": "default", "-dark": "dark_background"}
# A dot a contender, its speed as a share of the machine's: ours are coloured, the others grey.
COLOURS = "#2a9df4", "#17b169", "#b565d9", "#e0a100", "#f06292", "#00a3a3"
RING = {"marker": "o", "facecolor": "none", "edgecolor": RED, "s": 170, "lw": 2, "zorder": 4}
MARKERS = "ov^<>sDPX*"
# The bars of the README: contenders of a gpu.py run, as the picture names them, and its cases.
BARS = {
    f"{OURS}, backend=None, in jax.jit": ("backend=None, jax.jit", RED),
    "FlashAttention-3, paged": ("FlashAttention-3", "#3f5a74"),
    "FlashAttention-4, paged": ("FlashAttention-4", "#5f7a94"),
    "FlashInfer, paged": ("FlashInfer decode", "#6f8aa4"),
    "JAX's Pallas kernel, paged": ("JAX Pallas", "#7f9bb3"),
    "gather, then cuDNN": ("JAX gather + cuDNN", "#a3b8c9"),
    "cuDNN on keys in a row: no paging": ("JAX cuDNN, dense", "none"),
}
BAR_CASES = {
    "64 sequences of 4096": "decode 64x4096",
    "1 sequence of 131072": "decode 1x131072",
    "256 sequences of 1024": "decode 256x1024",
    "56 of 256 and 8 of 16384": "decode skewed",
}


def gpu_figure(data: dict):
    """Each contender's speed as a share of a copy's or a product's."""
    heights = (10, 4.5, 2.8) if data["step"] else (10, 4.5)
    machine, looks = data["machine"], styles(data)
    figure, panels = panels_of(heights, sum(heights) * 0.87)
    bandwidth, rate = machine["copy_tb_s"], machine["matmul_tflop_s"]
    decodes, others = split(data)
    plot_shares(panels[0], decodes, "kv_bytes", bandwidth, looks)
    panels[0].set_xlabel(
        f"K and V read, as a share of a copy's {bandwidth:.2f} TB/s (further right is faster)"
    )
    plot_shares(panels[1], others, "flops", rate, looks)
    panels[1].set_xlabel(
        f"arithmetic, as a share of a matrix product's {rate:.0f} TFLOP/s (further right is faster)"
    )
    if data["step"]:
        plot_step(panels[2], data["step"])
    legends(figure, looks, data["ours"])
    about = f"{machine['gpu']}: {machine['heads']}, bfloat16"
    figure.supxlabel(f"{about}\n{fill(versions_of(machine), 110)}", fontsize=9)
    return figure


def cpu_figure(data: dict):
    """Each contender's speed as a share of a sum's or a product's."""
    machine, looks = data["machine"], styles(data)
    decodes, others = split(data)
    rate = machine["matmul_gflop_s"]["float32"]
    figure, panels = panels_of((len(decodes) + 1, len(others) + 1), 13)
    if decodes:
        bandwidth = median(row["kv_bytes"] / row["us"][SUM] for row in decodes.values()) / 1e3
        plot_shares(panels[0], decodes, "kv_bytes", bandwidth / 1e3, looks)
        panels[0].set_xlabel(
            f"K and V read, as a share of the {bandwidth:.1f} GB/s of sums in turns with them "
            "(further right is faster)"
        )
    else:
        panels[0].remove()
    # Shares may exceed 1: torch's product is not the fastest there is.
    plot_shares(panels[1], others, "flops", rate / 1e3, looks)
    panels[1].set_xlabel(
        f"arithmetic, as a share of a float32 matrix product's {rate} GFLOP/s "
        "(further right is faster)"
    )
    legends(figure, looks, data["ours"])
    about = f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}: {machine['heads']}"
    figure.supxlabel(f"{about}\n{versions_of(machine)}", fontsize=9)
    return figure


def bars_figure(data: dict):
    """Decode on a GPU, all contenders in one unit."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 7), layout="constrained")
    for offset, (label, (name, colour)) in enumerate(BARS.items()):
        rows = [data["cases"][case] for case in BAR_CASES.values()]
        rates = [row["kv_bytes"] / row["us"][name] / 1e6 for row in rows]
        places = [-(place + 0.12 * offset) for place in range(len(rows))]
        edge = GREY if colour == "none" else colour
        bars = axes.barh(places, rates, 0.11, label=label, color=colour, edgecolor=edge)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    machine = data["machine"]
    axes.set_yticks([-(place + 0.35) for place in range(len(BAR_CASES))], list(BAR_CASES))
    about = f"longer is faster; a copy moves {machine['copy_tb_s']:.2f}"
    axes.set_xlabel(f"TB/s of keys and values read ({about})")
    axes.set_title(
        f"Decode on one {machine['gpu']}: {machine['heads']}, bfloat16, blocks of 16", fontsize=10
    )
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.4, 1.05), ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def bridge_figure(data: dict):
    """What calling torch from XLA costs, by part."""
    from matplotlib import pyplot

    looks = {"torch_call": (f"{OURS}: torch_call", RED)}
    machine, parts = data["machine"], data["us"]
    figure, panels = pyplot.subplots(
        1, len(parts), figsize=(13, 4), sharey=True, layout="constrained"
    )
    for axes, (part, rows) in zip(panels, parts.items(), strict=True):
        for way, row in rows.items():
            label, colour = looks.get(way, (way, GREY))
            axes.plot(list(row), list(row.values()), marker="o", label=label, color=colour)
        axes.set_yscale("log")
        axes.set_xlabel(part)
        axes.grid(axis="y", color=GREY, alpha=0.25)
    panels[0].set_ylabel("microseconds a call, log scale\n(lower is faster)")
    panels[0].legend(frameon=False)
    title = f"A torch function called by XLA, {machine['device']}, {machine['cores']} cores"
    figure.suptitle(f"{title}, {machine['date']}\n{versions_of(machine)}", fontsize=9)
    return figure


def releases_figure(data: dict):
    """Bars: how many times as fast as the first release each later one is."""
    from matplotlib import pyplot

    cases = {
        case: us
        for case, us in data["us"].items()
        if all(isinstance(us[version], float) for version in data["versions"])
    }
    first, *later = data["versions"]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 + 0.42 * len(cases)), layout="constrained")
    for offset, version in enumerate(later):
        ratios = [us[first] / us[version] for us in cases.values()]
        places = [-(place + 0.8 * offset / len(later)) for place in range(len(cases))]
        bars = axes.barh(places, ratios, 0.7 / len(later), color=RED, label=version)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    axes.axvline(1, color=GREY, linestyle=":")
    axes.set_yticks([-place for place in range(len(cases))], list(cases))
    about = data["machine"]
    axes.set_xlabel(f"times as fast as {first} ({about.get('gpu') or about['cpu']})")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def panels_of(heights: tuple[float, ...], height: float):
    from matplotlib import pyplot

    return pyplot.subplots(
        len(heights), 1, figsize=(11, height), height_ratios=heights, layout="constrained"
    )


def styles(data: dict) -> dict[str, dict]:
    """The look of each contender of a report; what `backend=None` takes has a ring around it."""
    names = list(dict.fromkeys(name for row in data["cases"].values() for name in row["us"]))
    rings = [name for name in names if name.startswith("backend=None")]
    filled = [name for name in names if name in data["ours"] and name not in rings]
    hollow = [name for name in names if name not in data["ours"]]
    looks = dict.fromkeys(rings, RING)
    for name, colour in zip(filled, itertools.cycle(COLOURS), strict=False):
        looks[name] = {"marker": "o", "color": colour, "s": 60, "zorder": 3}
    for name, marker in zip(hollow, itertools.cycle(MARKERS), strict=False):
        looks[name] = {"marker": marker, "facecolor": "none", "edgecolor": GREY, "s": 45}
    return looks


def split(data: dict) -> tuple[dict, dict]:
    """The cases bound by reading keys and values, and those bound by arithmetic."""
    cases = data["cases"].items()
    decodes = {name: row for name, row in cases if row["decode"]}
    return decodes, {name: row for name, row in cases if not row["decode"]}


def plot_shares(axes, rows: dict, measure: str, ceiling: float, looks: dict) -> None:
    """A line a case; `measure` over microseconds, as a share of `ceiling` in millions a second."""
    axes.grid(axis="y", color=GREY, alpha=0.25)
    for height, row in enumerate(reversed(rows.values())):
        for name, microseconds in row["us"].items():
            if microseconds is not None:
                share = row[measure] / microseconds / 1e6 / ceiling
                axes.scatter(share, height, **looks[name])
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.axvline(1, color=GREY, linestyle=":")
    axes.set_xlim(left=0)
    axes.set_ylim(-0.5, len(rows) - 0.5)


def plot_step(axes, step: dict) -> None:
    """Microseconds a layer as bars."""
    bars = [
        (f"{kernel}, {how}", us) for kernel, row in step["us"].items() for how, us in row.items()
    ]
    bars = [(name, us) for name, us in bars if us is not None][::-1]
    names, lengths = zip(*bars, strict=True)
    colours = [RED if name.endswith("jax.jit") else GREY for name in names]
    axes.barh(range(len(bars)), lengths, color=colours)
    axes.bar_label(axes.containers[0], fmt="%.1f", padding=3)
    axes.set_yticks(range(len(bars)), names)
    axes.margins(x=0.1)
    axes.set_title(f"{OURS}'s backends inside jax.jit (coloured) and from torch (grey)", size=10)
    axes.set_xlabel(
        f"us a layer in a step of {step['layers']} layers, {step['case']} (shorter is faster)"
    )


def legends(figure, looks: dict, ours: list[str]) -> None:
    """Two legends at the top of the figure: ours, and the others."""
    sides = {
        "upper left": (f"{OURS} (coloured)", [name for name in looks if name in ours], 2),
        "upper right": ("others (grey)", [name for name in looks if name not in ours], 3),
    }
    axes = figure.axes[0]
    for side, (title, names, columns) in sides.items():
        handles = [axes.scatter([], [], label=name, **looks[name]) for name in names]
        legend = figure.legend(
            handles=handles, title=title, loc=f"outside {side}", ncols=columns, frameon=False
        )
        legend.get_title().set_fontweight("bold")


def versions_of(machine: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items())


def draw(report: Path, figure_of: Callable[[dict], Any], suffix: str = "") -> Path:
    """Draws a report beside it, under its name and the suffix; returns the light picture."""
    data, light = json.loads(report.read_text()), report.with_name(f"{report.stem}{suffix}.svg")
    save_both(light, lambda: figure_of(data))
    return light


def save_both(light: Path, figure_of: Callable[[], Any]) -> None:
    """Saves the figure that is made, in the style of light pages and in that of dark ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for suffix, style in LOOKS.items():
        settings = {"svg.hashsalt": light.stem, "axes.axisbelow": True}
        with pyplot.style.context([style, settings]):
            figure = figure_of()
            figure.savefig(
                light.with_stem(light.stem + suffix), transparent=True, metadata={"Date": None}
            )
            pyplot.close(figure)


def redraw(folder: Path) -> list[Path]:
    """Draws every report of a folder; returns the pictures for light pages."""
    return [
        draw(folder / "h200.json", gpu_figure),
        draw(folder / "h100.json", gpu_figure),
        draw(folder / "h100.json", bars_figure, "-decode"),
        draw(folder / "cpu.json", cpu_figure),
        draw(folder / "bridge.json", bridge_figure),
        *(draw(report, releases_figure) for report in sorted(folder.glob("releases_*.json"))),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the reports, such as docs/results")
    print(*redraw(parser.parse_args().folder), sep="\n")
