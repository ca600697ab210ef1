"""The bars of the README: decode on a GPU, all contenders in one unit."""

from pathlib import Path

from benchmarks.pictures import GREY, OURS, draw_both

# Contenders of a gpu.py run, as the picture names them.
BARS = {
    f"{OURS}, backend=None, in jax.jit": ("backend=None, jax.jit", "#e4572e"),
    "FlashAttention-3, paged": ("FlashAttention-3", "#3f5a74"),
    "FlashAttention-4, paged": ("FlashAttention-4", "#5f7a94"),
    "FlashInfer, paged": ("FlashInfer decode", "#6f8aa4"),
    "JAX's Pallas kernel, paged": ("JAX Pallas", "#7f9bb3"),
    "gather, then cuDNN": ("JAX gather + cuDNN", "#a3b8c9"),
    "cuDNN on keys in a row: no paging": ("JAX cuDNN, dense", "none"),
}
CASES = {
    "64 sequences of 4096": "decode 64x4096",
    "1 sequence of 131072": "decode 1x131072",
    "256 sequences of 1024": "decode 256x1024",
    "56 of 256 and 8 of 16384": "decode skewed",
}


def draw(report: Path) -> Path:
    """Draws the bars beside a report with matplotlib, for light and for dark pages."""
    return draw_both(report, f"{report.stem}-decode", plot)


def plot(data: dict):
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 7), layout="constrained")
    for offset, (label, (name, colour)) in enumerate(BARS.items()):
        rows = [data["cases"][case] for case in CASES.values()]
        rates = [row["kv_bytes"] / row["us"][name] / 1e6 for row in rows]
        places = [-(place + 0.12 * offset) for place in range(len(rows))]
        edge = GREY if colour == "none" else colour
        bars = axes.barh(places, rates, 0.11, label=label, color=colour, edgecolor=edge)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8)
    machine = data["machine"]
    axes.set_yticks([-(place + 0.35) for place in range(len(CASES))], list(CASES))
    about = f"longer is faster; a copy moves {machine['copy_tb_s']:.2f}"
    axes.set_xlabel(f"TB/s of keys and values read ({about})")
    axes.set_title(
        f"Decode on one {machine['gpu']}: {machine['heads']}, bfloat16, blocks of 16", fontsize=10
    )
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.4, 1.05), ncols=3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure
