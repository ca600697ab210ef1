"""The picture of a cpu.py run: each contender's speed as a share of the machine's."""

from pathlib import Path
from statistics import median

from benchmarks.dots import dots, legends, split, styles
from benchmarks.pictures import draw_both, versions_of
from benchmarks.work import SUM


def draw(report: Path) -> Path:
    """Draws a report beside it with matplotlib, for light and for dark pages."""
    return draw_both(report, report.stem, plot)


def plot(data: dict):
    from matplotlib import pyplot

    machine, looks = data["machine"], styles(data)
    decodes, others = split(data)
    rate = machine["matmul_gflop_s"]["float32"]
    bandwidth = median(row["kv_bytes"] / row["us"][SUM] for row in decodes.values()) / 1e3
    heights = len(decodes) + 1, len(others) + 1
    figure, panels = pyplot.subplots(
        2, 1, figsize=(11, 13), height_ratios=heights, layout="constrained"
    )
    dots(panels[0], decodes, "kv_bytes", bandwidth / 1e3, looks)
    panels[0].set_xlabel(
        f"K and V read, as a share of the {bandwidth:.1f} GB/s of sums in turns with them "
        "(further right is faster)"
    )
    # Shares may exceed 1: torch's product is not the fastest there is.
    dots(panels[1], others, "flops", rate / 1e3, looks)
    panels[1].set_xlabel(
        f"arithmetic, as a share of a float32 matrix product's {rate} GFLOP/s "
        "(further right is faster)"
    )
    legends(figure, looks, data["ours"])
    about = f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}: {machine['heads']}"
    figure.supxlabel(f"{about}\n{versions_of(machine)}", fontsize=9)
    return figure
