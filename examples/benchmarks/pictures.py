"""Pictures of reports: each drawn twice, for light pages and for dark ones."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS = "pagedattn"
GREY = "#8a8a8a"  # legible on white and on black
LOOKS = {"": "default", "-dark": "dark_background"}


def draw_both(report: Path, name: str, plot: Callable[[dict], Any]) -> Path:
    """Writes `name`.svg and `name`-dark.svg beside a report; `plot` makes a figure of its data.

    Returns the path of the light picture. The same report gives the same bytes.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(report.read_text())
    for suffix, style in LOOKS.items():
        with pyplot.style.context([style, {"svg.hashsalt": name, "axes.axisbelow": True}]):
            picture = report.with_name(f"{name}{suffix}.svg")
            figure = plot(data)
            figure.savefig(picture, transparent=True, metadata={"Date": None})
            pyplot.close(figure)
    return report.with_name(f"{name}.svg")


def versions_of(machine: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
