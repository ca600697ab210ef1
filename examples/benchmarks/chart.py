"""The picture of a gpu.py run: each contender's speed as a share of the machine's."""

import json
from pathlib import Path

OURS = ("#c0392b", "#e67e22", "#8e44ad", "#2471a3", "#16a085", "#7f6000")  # filled; peers are grey
MARKERS = "ov^<>sDPX*"


def draw(report: Path) -> Path:
    """Draws a report beside it, as PNG, with matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    data = json.loads(report.read_text())
    figure, panels = pyplot.subplots(
        3, 1, figsize=(11, 15), height_ratios=(10, 4.5, 2.4), layout="constrained"
    )
    machine, look = data["machine"], styles(data)
    bandwidth, rate = machine["copy_tb_s"], machine["matmul_tflop_s"]
    decodes = {name: row for name, row in data["cases"].items() if row["decode"]}
    others = {name: row for name, row in data["cases"].items() if not row["decode"]}
    dots(panels[0], decodes, "kv_bytes", bandwidth, look)
    panels[0].set_xlabel(f"K and V read, as a share of a copy's {bandwidth:.2f} TB/s")
    dots(panels[1], others, "flops", rate, look)
    panels[1].set_xlabel(f"arithmetic, as a share of a bf16 matrix product's {rate:.0f} TFLOP/s")
    _step(panels[2], data["step"])
    legend(panels[0], look)
    figure.suptitle(
        f"{machine['gpu']}: {machine['heads']}, bfloat16\n"
        + ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    )
    picture = report.with_suffix(".png")
    figure.savefig(picture, dpi=110)
    return picture


def styles(data) -> dict[str, dict]:
    """Markers by contender: ours coloured and filled, peers grey and hollow."""
    names = list(dict.fromkeys(name for row in data["cases"].values() for name in row["us"]))
    ours = [name for name in names if name in data["ours"]]
    peers = [name for name in names if name not in data["ours"]]
    styles = {
        name: {"marker": "o", "color": color, "s": 70, "zorder": 3}
        for name, color in zip(ours, OURS, strict=False)
    }
    for name, marker in zip(peers, MARKERS, strict=False):
        styles[name] = {"marker": marker, "facecolor": "none", "edgecolor": "#555555", "s": 45}
    return styles


def dots(axes, rows, measure, ceiling, styles) -> None:
    for height, row in enumerate(reversed(rows.values())):
        axes.axhline(height, color="#eeeeee", zorder=0)
        for name, microseconds in row["us"].items():
            if microseconds is not None:
                share = row[measure] / microseconds / 1e6 / ceiling
                axes.scatter(share, height, **styles[name])
    axes.set_yticks(range(len(rows)), list(reversed(rows)))
    axes.axvline(1, color="#999999", linestyle=":")
    axes.set_xlim(0, 1.1)
    axes.set_ylim(-0.5, len(rows) - 0.5)


def legend(axes, styles) -> None:
    for name, style in styles.items():
        axes.scatter([], [], label=name, **style)
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.45, 1.0), frameon=False)


def _step(axes, step) -> None:
    """Microseconds a layer as bars."""
    bars = [
        (f"{kernel}, {how}", us) for kernel, row in step["us"].items() for how, us in row.items()
    ]
    bars = [(name, us) for name, us in bars if us is not None][::-1]
    lengths = [us for _, us in bars]
    axes.barh(range(len(bars)), lengths, color=_colors(name for name, _ in bars))
    axes.bar_label(axes.containers[0], fmt="%.1f", padding=3)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.margins(x=0.1)
    axes.set_xlabel(f"us a layer in a step of {step['layers']} layers, {step['case']}")


def _colors(names) -> list[str]:
    return ["#c0392b" if name.endswith("jax.jit") else "#bbbbbb" for name in names]
