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
    data, light = json.loads(report.read_text()), report.with_name(f"{name}.svg")
    save_both(light, lambda: plot(data))
    return light


def save_both(light: Path, plot: Callable[[], Any]) -> None:
    """Saves the figure that `plot` makes, in the style of light pages and in that of dark ones."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for suffix, style in LOOKS.items():
        settings = {"svg.hashsalt": light.stem, "axes.axisbelow": True}
        with pyplot.style.context([style, settings]):
            figure = plot()
            figure.savefig(
                light.with_stem(light.stem + suffix), transparent=True, metadata={"Date": None}
            )
            pyplot.close(figure)


def versions_of(machine: dict) -> str:
    return ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
