"""The picture of a cpu.py run: each contender's speed as a share of the machine's."""

import json
from pathlib import Path

from benchmarks.chart import dots, legend, styles


def draw(report: Path) -> Path:
    """Draws a report beside it, as PNG, with matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(report.read_text())
    machine, look = data["machine"], styles(data)
    decodes = {name: row for name, row in data["cases"].items() if row["decode"]}
    others = {name: row for name, row in data["cases"].items() if not row["decode"]}
    bandwidth, rate = machine["read_gb_s"], machine["matmul_gflop_s"]["float32"]
    figure, panels = pyplot.subplots(
        2,
        1,
        figsize=(11, 13),
        height_ratios=(len(decodes) + 1, len(others) + 1),
        layout="constrained",
    )
    dots(panels[0], decodes, "kv_bytes", bandwidth / 1e3, look)
    panels[0].set_xlabel(f"K and V read, as a share of a sum's {bandwidth} GB/s")
    dots(panels[1], others, "flops", rate / 1e3, look)
    panels[1].set_xlabel(f"arithmetic, as a share of a float32 matrix product's {rate} GFLOP/s")
    panels[1].autoscale(
        axis="x"
    )  # shares may exceed 1: torch's product is not the fastest there is
    panels[1].set_xlim(left=0)
    legend(panels[0], look)
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    title = f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}: {machine['heads']}"
    figure.suptitle(f"{title}\n{versions}", fontsize=9)
    picture = report.with_suffix(".png")
    figure.savefig(picture, dpi=110)
    return picture
