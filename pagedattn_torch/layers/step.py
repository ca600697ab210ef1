"""What layers of one kind share in a step, prepared once and held by the step's metadata."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn import KVCache

from ..attention import Step
from ..cache import write_rows_
from ..rows import DeviceRows, HostRows
from .inputs import Fresh
from .plans import Part


class LayerStep(NamedTuple):
    """The parts of a call, each with what its backend prepared, and where new keys are written."""

    parts: list[tuple[Part, Step]]
    rows: HostRows | DeviceRows | None

    @torch.no_grad()
    def run(self, query: Tensor, fresh: Fresh | None, cache: KVCache | None) -> Tensor:
        """Writes, then attends. The arrays are known to be like those it was prepared with."""
        if self.rows is not None and fresh is not None and cache is not None:
            write_rows_(cache, *fresh, self.rows)
        return _sum(step.run(*part.arrays(query, fresh, cache)) for part, step in self.parts)


def _sum(results) -> Tensor:
    """The rows of all tokens; the results after the first are of the first tokens."""
    (out, _), *others = results
    for part, _ in others:
        out[: len(part)] += part
    return out


def likeness(layer: Any, kind, query: Tensor, fresh: Fresh | None, cache: KVCache | None):
    """What two calls of a step must have in common to share what was prepared."""
    planes = () if cache is None else (cache.key, cache.value)
    arrays = (query, *(fresh or ()), *planes)
    facts = tuple((x.shape, x.stride(), x.dtype, x.device) for x in arrays)
    return type(layer), kind, layer.specs[kind], fresh is None, cache is None, facts
