"""The picture of a gpu.py run: each contender's speed as a share of the machine's."""

from pathlib import Path
from textwrap import fill

from benchmarks.dots import dots, legends, split, styles
from benchmarks.pictures import GREY, OURS, draw_both, versions_of

JIT = "#e4572e"


def draw(report: Path) -> Path:
    """Draws a report beside it with matplotlib, for light and for dark pages."""
    return draw_both(report, report.stem, plot)


def plot(data: dict):
    from matplotlib import pyplot

    heights = (10, 4.5, 2.8) if data["step"] else (10, 4.5)
    size = (11, sum(heights) * 0.87)
    figure, panels = pyplot.subplots(
        len(heights), 1, figsize=size, height_ratios=heights, layout="constrained"
    )
    machine, looks = data["machine"], styles(data)
    bandwidth, rate = machine["copy_tb_s"], machine["matmul_tflop_s"]
    decodes, others = split(data)
    dots(panels[0], decodes, "kv_bytes", bandwidth, looks)
    panels[0].set_xlabel(
        f"K and V read, as a share of a copy's {bandwidth:.2f} TB/s (further right is faster)"
    )
    dots(panels[1], others, "flops", rate, looks)
    panels[1].set_xlabel(
        f"arithmetic, as a share of a matrix product's {rate:.0f} TFLOP/s (further right is faster)"
    )
    if data["step"]:
        plot_step(panels[2], data["step"])
    legends(figure, looks, data["ours"])
    about = f"{machine['gpu']}: {machine['heads']}, bfloat16"
    figure.supxlabel(f"{about}\n{fill(versions_of(machine), 110)}", fontsize=9)
    return figure


def plot_step(axes, step: dict) -> None:
    """Microseconds a layer as bars."""
    bars = [
        (f"{kernel}, {how}", us) for kernel, row in step["us"].items() for how, us in row.items()
    ]
    bars = [(name, us) for name, us in bars if us is not None][::-1]
    names, lengths = zip(*bars, strict=True)
    colours = [JIT if name.endswith("jax.jit") else GREY for name in names]
    axes.barh(range(len(bars)), lengths, color=colours)
    axes.bar_label(axes.containers[0], fmt="%.1f", padding=3)
    axes.set_yticks(range(len(bars)), names)
    axes.margins(x=0.1)
    axes.set_title(f"{OURS}'s backends inside jax.jit (coloured) and from torch (grey)", size=10)
    axes.set_xlabel(
        f"us a layer in a step of {step['layers']} layers, {step['case']} (shorter is faster)"
    )
