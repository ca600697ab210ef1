"""What the layers of a step of continuous batching share: its batch, and how it is attended to."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pagedattn import AttentionSpec, BatchMetadata, KVCache
from pagedattn._dispatch.call import layer_of

from ..step import Step, prepare

HELD = "pagedattn_shared"


@dataclass(eq=False)
class Shared:
    """A batch that the first layer of its kind has made, and the steps prepared from it.

    Fields:
      arrays, versions: what it was made of, and how often torch had changed that in place.
      batch: the batch.
      steps: those prepared so far, by what makes layers differ: their spec, sinks and sizes.
    """

    arrays: list[Tensor]
    versions: list[int]
    batch: BatchMetadata
    steps: dict[Any, Step] = field(default_factory=dict)

    def attend(
        self,
        query: Tensor,
        pages: KVCache,
        spec: AttentionSpec,
        sinks: Tensor | None,
        *,
        backend: str | None,
        batch_invariant: bool,
    ) -> Tensor:
        kind = (spec, backend, batch_invariant, sinks is None, layer_of(query, pages))
        if kind not in self.steps:
            options = {"backend": backend, "batch_invariant": batch_invariant}
            self.steps[kind] = prepare(query, pages, self.batch, spec, **options, sinks=sinks)
        return self.steps[kind].attend(query, pages, sinks=sinks)[0]


def shared_by_layers(
    step: dict[str, Any], allocator: Any, make: Callable[[], BatchMetadata]
) -> Shared:
    """What the layers of an allocator share, made by the first of them.

    The engine makes the starts of the queries anew for each step and hands them to all layers, so
    they hold it: an attribute of that tensor. The batch must not hold the tensor in turn.
    """
    starts = step["cu_seq_lens_q"]
    kind, index = allocator.layer_type, allocator.index
    arrays = [step["cu_seq_lens_k"][kind], step["write_index"][index], step["read_index"][index]]
    if any(array.is_inference() for array in (starts, *arrays)):  # nothing counts their changes
        return Shared(arrays, [], make())
    versions = [array._version for array in (starts, *arrays)]
    held: dict[int, Shared] = vars(starts).setdefault(HELD, {})
    shared = held.get(index)
    if shared is None or not _are_same(shared.arrays, arrays) or shared.versions != versions:
        shared = held[index] = Shared(arrays, versions, make())
    return shared


def _are_same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(a is b for a, b in zip(some, others, strict=True))
