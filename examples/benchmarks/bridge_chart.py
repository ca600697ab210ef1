"""The picture of a bridge.py run."""

from pathlib import Path

from benchmarks.pictures import GREY, OURS, draw_both, versions_of

LABELS = {"torch_call": f"{OURS}: torch_call"}
COLOURS = {"torch_call": "#e4572e", "jax.pure_callback": GREY}


def draw(report: Path) -> Path:
    """Draws a report beside it with matplotlib, for light and for dark pages."""
    return draw_both(report, report.stem, plot)


def plot(data: dict):
    from matplotlib import pyplot

    machine, parts = data["machine"], data["us"]
    figure, panels = pyplot.subplots(
        1, len(parts), figsize=(13, 4), sharey=True, layout="constrained"
    )
    for axes, (part, rows) in zip(panels, parts.items(), strict=True):
        for way, row in rows.items():
            label, colour = LABELS.get(way, way), COLOURS.get(way)
            axes.plot(list(row), list(row.values()), marker="o", label=label, color=colour)
        axes.set_yscale("log")
        axes.set_xlabel(part)
        axes.grid(axis="y", color=GREY, alpha=0.25)
    panels[0].set_ylabel("microseconds a call, log scale\n(lower is faster)")
    panels[0].legend(frameon=False)
    title = f"A torch function called by XLA, {machine['device']}, {machine['cores']} cores"
    figure.suptitle(f"{title}, {machine['date']}\n{versions_of(machine)}", fontsize=9)
    return figure
