"""Who owned which block when: counts, and a picture of them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, to_hex
from matplotlib.figure import Figure

from pagedattn_serving.engine.owners import CACHED, FREE, Owners

KEPT = "#8a8a8a40"  # the colour of blocks that only the prefix cache holds


def colour_of(request_id: int) -> str:
    return to_hex(colormaps["tab20"](request_id % 20))


def blocks_used(owners: Owners) -> Int[np.ndarray, " num_steps"]:
    """Blocks that requests own, without those that only the prefix cache keeps for them."""
    return (owners > FREE).sum(axis=1)


def blocks_padded(owners: Owners, longest: int) -> Int[np.ndarray, " num_steps"]:
    """Blocks that the same requests would own if each had `longest` blocks all the time."""
    return np.array([longest * len(np.unique(step[step > FREE])) for step in owners])


def draw_occupancy(
    owners: Owners, longest: int, path: Path, num_blocks: Sequence[int] = ()
) -> None:
    """Writes the picture of `plot_occupancy`."""
    plot_occupancy(owners, longest, num_blocks).savefig(path, dpi=130)


def plot_occupancy(owners: Owners, longest: int, num_blocks: Sequence[int] = ()) -> Figure:
    """Above, each block's owner at each step; below, how many blocks are used.

    Lines part the pools, if they are several, of so many blocks each.
    """
    figure = Figure(figsize=(11, 7), layout="constrained")
    pool, count = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    draw_owners(pool, owners)
    for first in np.cumsum(num_blocks[:-1]):
        pool.axhline(first - 0.5, color="black", linewidth=0.8)
    draw_counts(count, owners, longest)
    return figure


def draw_owners(axes: Axes, owners: Owners) -> None:
    ids = np.unique(owners[owners > FREE])
    colours = ListedColormap(
        [KEPT, "none", *(colour_of(request) for request in range(ids.max() + 1))]
    )
    axes.imshow(
        owners.T - CACHED,
        cmap=colours,
        vmin=0,
        vmax=colours.N - 1,
        aspect="auto",
        interpolation="nearest",
        origin="lower",
    )
    for request in ids:  # empty lines, which only make entries of the legend
        axes.plot([], [], "s", color=colour_of(request), label=str(request))
    axes.plot([], [], "s", color=KEPT, label="kept")
    axes.legend(title="request", loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    axes.set(title="The request in each block of the cache", ylabel="block")


def draw_counts(axes: Axes, owners: Owners, longest: int) -> None:
    axes.plot(blocks_padded(owners, longest), color="grey", label="padded to the longest")
    axes.plot(blocks_used(owners), color="tab:blue", label="used")
    axes.axhline(owners.shape[1], color="firebrick", linestyle="--", label="pool")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small")
    axes.set(xlabel="step", ylabel="blocks", ylim=(0, None))
