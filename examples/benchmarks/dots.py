"""A dot a contender: its speed as a share of the machine's. Ours are coloured, the others grey."""

import itertools

from benchmarks.pictures import GREY, OURS

COLOURS = "#2a9df4", "#17b169", "#b565d9", "#e0a100", "#f06292", "#00a3a3"
RING = {"marker": "o", "facecolor": "none", "edgecolor": "#e4572e", "s": 170, "lw": 2, "zorder": 4}
MARKERS = "ov^<>sDPX*"


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


def dots(axes, rows: dict, measure: str, ceiling: float, looks: dict) -> None:
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


def split(data: dict) -> tuple[dict, dict]:
    """The cases bound by reading keys and values, and those bound by arithmetic."""
    cases = data["cases"].items()
    decodes = {name: row for name, row in cases if row["decode"]}
    return decodes, {name: row for name, row in cases if not row["decode"]}


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
