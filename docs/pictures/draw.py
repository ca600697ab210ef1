"""Draws the pictures of this folder, for light pages and for dark ones.

PYTHONPATH=examples python docs/pictures/draw.py
"""

from pathlib import Path

import numpy as np
from benchmarks.plot import GREY, save_both
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.checkpoint.tokenizer import load_tokenizer
from pagedattn_serving.demo.occupancy import plot_occupancy
from pagedattn_serving.demo.run import make_requests, serve
from pagedattn_serving.engine.engine import Engine

HERE = Path(__file__).parent
BLOCK_SIZE, NUM_BLOCKS = 4, 8
TABLES = {"A": ([3, 0, 5], 10, "#2a9df4"), "B": ([6, 1], 6, "#e4572e")}  # blocks, tokens, colour
TOP, TABLE, POOL = 5.2, 3.7, 0.6  # where the rows of the picture stand
WIDTH = BLOCK_SIZE + 0.6


def paging() -> Figure:
    """Two sequences, their block tables, and the blocks and slots that these lead to."""
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes, column = figure.add_subplot(), 0.0
    for block in range(NUM_BLOCKS):
        draw_slots(axes, block)
    for name, (blocks, length, colour) in TABLES.items():
        label = f"sequence {name}: {length} tokens"
        axes.text(column, TOP + 1.25, label, color=colour, weight="bold")
        axes.text(column, TABLE + 0.7, f"block_tables, row of {name}", size=8)
        for index, block in enumerate(blocks):
            tokens = range(index * BLOCK_SIZE, min(length, (index + 1) * BLOCK_SIZE))
            draw_block(axes, column, name, tokens, block, colour)
            column += WIDTH
        column += 1.5
    last = (NUM_BLOCKS - 1) * WIDTH
    axes.text(
        0, POOL - 1.5, "The cache. Small numbers: slots, block * block_size + offset.", size=9
    )
    axes.text(last + BLOCK_SIZE, POOL - 1.5, "empty: anything may stand there", size=9, ha="right")
    axes.set(xlim=(-0.3, last + BLOCK_SIZE + 0.3), ylim=(-1.2, TOP + 2))
    axes.set_axis_off()
    return figure


def draw_slots(axes, block: int) -> None:
    """A block of the cache, its slots empty."""
    left = block * WIDTH
    axes.text(left + BLOCK_SIZE / 2, POOL - 0.85, f"block {block}", ha="center", size=8)
    for offset in range(BLOCK_SIZE):
        cell(axes, left + offset, POOL, "none")
        slot = str(block * BLOCK_SIZE + offset)
        axes.text(left + offset + 0.5, POOL - 0.35, slot, ha="center", size=6, color=GREY)


def draw_block(axes, column: float, name: str, tokens: range, block: int, colour: str) -> None:
    """Some tokens of a sequence, the entry of its table, and the same tokens in the cache."""
    for offset, token in enumerate(tokens):
        for left, bottom in ((column + offset, TOP), (block * WIDTH + offset, POOL)):
            cell(axes, left, bottom, colour)
            text = f"{name.lower()}{token}"
            axes.text(left + 0.5, bottom + 0.5, text, ha="center", va="center", size=8)
    middle = column + BLOCK_SIZE / 2
    cell(axes, middle - 0.5, TABLE - 0.4, "none", edge=colour)
    axes.text(middle, TABLE + 0.1, str(block), ha="center", va="center", weight="bold")
    target = (block * WIDTH + BLOCK_SIZE / 2, POOL + 1.1)
    arrow = {"arrowstyle": "->", "color": colour, "lw": 1.2}
    axes.annotate("", xy=target, xytext=(middle, TABLE - 0.4), arrowprops=arrow)


def cell(axes, left: float, bottom: float, colour: str, edge: str = GREY) -> None:
    face = colour + "90" if colour != "none" else colour
    axes.add_patch(Rectangle((left, bottom), 1, 1, facecolor=face, edgecolor=edge, lw=0.8))


def pool() -> tuple[np.ndarray, int]:
    """The owners of blocks while the demo's requests are served, and the longest's blocks."""
    model, params = load_checkpoint(SHIPPED)
    requests = make_requests(load_tokenizer(SHIPPED), 240)
    limits = Limits(96, 16, max(request.max_cached for request in requests), 8)
    owners = serve(Engine(params, model, limits, "xla"), requests).owners
    return owners, limits.blocks_for(limits.max_seq_len)


if __name__ == "__main__":
    save_both(HERE / "paging.svg", paging)
    owners, longest = pool()
    save_both(HERE / "pool.svg", lambda: plot_occupancy(owners, longest))
