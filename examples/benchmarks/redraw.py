"""Draws the pictures of committed reports anew.

PYTHONPATH=examples python -m benchmarks.redraw docs/results
"""

import sys
from pathlib import Path

from benchmarks import bridge_chart, chart, cpu_chart, headline

DRAWINGS = {
    "h200.json": (chart.draw, headline.draw),
    "cpu.json": (cpu_chart.draw,),
    "bridge.json": (bridge_chart.draw,),
}


def redraw(folder: Path) -> list[Path]:
    """Draws every report of a folder; returns the pictures for light pages."""
    return [draw(folder / name) for name, drawings in DRAWINGS.items() for draw in drawings]


if __name__ == "__main__":
    print(*redraw(Path(sys.argv[1])), sep="\n")
