"""What layers of one kind share in a step: prepared once, and kept in the step's metadata."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn import KVCache

from ..cache import DeviceRows, HostRows, apart, write_rows_
from ..step import Step
from ..uncompiled import uncompiled
from .inputs import Fresh
from .metadata import derived
from .plans import Part

# The place of a step that its caller prepared: wherever layers run.
ANYWHERE = "anywhere"


class LayerStep(NamedTuple):
    """The parts of a call, each with its prepared step, and where new keys are written."""

    parts: list[tuple[Part, Step]]
    rows: HostRows | DeviceRows | None
    batch_invariant: bool = False

    @uncompiled
    @torch.no_grad()
    def run(self, query: Tensor, fresh: Fresh | None, cache: KVCache | None) -> Tensor:
        """Writes, then attends; without checks, for arrays that are like the prepared ones.

        The result is the sum of the parts'. The first has all tokens; others may have only the
        first ones.
        """
        if fresh is not None and cache is not None:
            key, value = apart(cache, *fresh)
            fresh = Fresh(key, value)
        # Before the write: it may replace keys behind the window, which first tokens still see.
        arrays = [part.arrays(query, fresh, cache) for part, _ in self.parts]
        if self.rows is not None and fresh is not None and cache is not None:
            write_rows_(cache, *fresh, self.rows)
        (out, _), *others = [
            step.run(*given, **part.options)
            for given, (part, step) in zip(arrays, self.parts, strict=True)
        ]
        for more, _ in others:
            out[: more.shape[0]] += more
        return out.add_(0) if self.batch_invariant else out  # no -0, as in sums of parts


def likeness(layer: Any, kind, query: Tensor, fresh: Fresh | None, cache: KVCache | None):
    """All that two calls of a step must have in common to share what was prepared: a key."""
    held = () if cache is None else cache.by_slot.values()
    arrays = (query, *(fresh or ()), *held)
    facts = tuple((x.shape, x.stride(), x.dtype, x.device) for x in arrays)
    formula = type(layer), layer.backend, kind, layer.specs[kind], layer.batch_invariant
    return *formula, fresh is None, cache is None, facts


def shared(meta, key, device: torch.device, make: Callable[[], LayerStep]) -> LayerStep:
    """The step of layers that are alike: prepared, left by the first of them, or made now."""
    places = derived.held(meta).setdefault(key, {})
    if ANYWHERE in places:
        return places[ANYWHERE]
    place = _place(device)
    if place is None or not derived.notices_changes(meta):
        return make()
    if place not in places:
        places[place] = make()
    return places[place]


def _place(device):
    """Where a step is right that one layer leaves to the next; None for nowhere.

    On a GPU that is the stream on which its arrays are computed. A graph that is captured computes
    them itself whenever it is replayed, of what the metadata's tensors hold then.
    """
    if device.type == "cpu":
        return torch.get_num_threads()
    module = {"cuda": torch.cuda, "xpu": torch.xpu}.get(device.type)
    if module is None:
        return None
    with module.device(device):
        captures = getattr(module, "is_current_stream_capturing", bool)  # no XPU graphs in 2.8
        return None if captures() else module.current_stream()
