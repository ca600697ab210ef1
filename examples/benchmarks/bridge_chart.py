"""The picture of a bridge.py run."""

import json
from pathlib import Path


def draw(report: Path) -> Path:
    """Draws a report beside it, as PNG, with matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(report.read_text())
    machine, parts = data["machine"], data["us"]
    figure, panels = pyplot.subplots(1, len(parts), figsize=(13, 4), layout="constrained")
    for axes, (part, rows) in zip(panels, parts.items(), strict=True):
        for way, row in rows.items():
            axes.plot(list(row), list(row.values()), marker="o", label=way)
        axes.set_yscale("log")
        axes.set_xlabel(part)
        axes.grid(axis="y", color="#eeeeee")
    panels[0].set_ylabel("microseconds a call")
    panels[0].legend(frameon=False)
    versions = ", ".join(f"{name} {value}" for name, value in machine["versions"].items())
    title = f"A torch function called by XLA, {machine['device']}, {machine['cores']} cores"
    figure.suptitle(f"{title}, {machine['date']}\n{versions}", fontsize=9)
    picture = report.with_suffix(".png")
    figure.savefig(picture, dpi=110)
    return picture
