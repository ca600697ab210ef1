"""What the layers of a step share on torch tensors: the checked call, its backend and its plan."""

import contextlib
import dataclasses
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from pagedattn import (
    AttentionSpec,
    Backend,
    BatchMetadata,
    Crossings,
    InvalidInputError,
    KVCache,
    PagedAttentionError,
    Selection,
    UnsupportedError,
)
from pagedattn._arrays.memory import require_alike, require_dense
from pagedattn._dispatch import emulate, select, validate
from pagedattn._dispatch.call import Call, call_of, layer_of
from pagedattn._dispatch.options import (
    ARRAYS,
    facts_of,
    for_backends,
    given_of,
    validate_arrays,
    validate_fit,
)
from pagedattn._dispatch.registry import Framework
from pagedattn._dispatch.signatures import lists_arrays
from pagedattn.batch import validate as validate_batch
from pagedattn.batch.metadata import Sequences
from pagedattn.cache import validate as validate_cache

from .arrays import (
    arrays_of,
    batch_arrays,
    batch_on,
    on_device_of,
    require_beside,
    require_no_grad,
    require_tensors,
    tensor,
    with_dense_rows,
    without_autocast,
)
from .uncompiled import uncompiled

Query = Float[Tensor, "num_tokens num_heads head_dim"]
Out = Float[Tensor, "num_tokens num_heads value_dim"]
Lse = Float[Tensor, "num_tokens num_heads"]
Flags = tuple[bool, bool]  # return_lse and batch_invariant


@dataclass(frozen=True)
class Step:
    """What the layers of one step share, made by `prepare` and held by the caller.

    It is made of the batch's values at that time, and may read its arrays again: leave them as they
    are until the last layer has attended, and prepare another one for the next step. Nor can it be
    copied or pickled, since a plan may hold addresses of memory.

    Fields:
      call: the sizes and options that it was made for.
      backend: the backend that runs.
      plan: what the backend worked out from the batch: lengths on the host, ids, masks.
      batch: the sequences that it was planned for, on the query's device.
      live: which tokens are not padding, where a backend needs it.
    """

    call: Call
    backend: Backend
    plan: Any
    batch: Sequences
    live: Bool[Tensor, "num_tokens"] | None

    @uncompiled
    @lists_arrays
    def attend(
        self, query: Query, cache: KVCache, **arrays: Tensor | Selection | None
    ) -> tuple[Out, Lse | None]:
        """Attention of one layer: out, and lse if the step was prepared with `return_lse`.

        Args:
          arrays: the keywords of `paged_attention` for arrays: those that it was prepared with.

        Raises:
          InvalidInputError: query or cache have other sizes, dtypes or strides than those that the
            step was prepared with, or it was prepared with other options: sinks, a bias.
        """
        _require_layer(query, cache)
        if 0 in [plane.ndim for plane in cache.planes]:
            raise InvalidInputError("the cache's planes have no axes")
        validate_cache.scales(cache)
        query = as_loaded(query, cache)
        expected, got = self.call.layer, layer_of(query, cache)
        if got != expected:
            raise InvalidInputError(f"the step was prepared for {expected}, got {got}")
        options = given_of(arrays)
        if options:
            _require_options(query, **options)
        expected = {name: fact for name in ARRAYS if (fact := getattr(self.call, name))}
        if (got := facts_of(options)) != expected:
            raise InvalidInputError(f"the step was prepared with {expected}, got {got}")
        with torch.no_grad():
            return self.run(query, cache, **options)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a Step can be neither copied nor pickled, since it holds addresses of memory: call "
            "prepare again, in the process that attends"
        )

    def run(self, query: Query, cache: KVCache, **options: Tensor) -> tuple[Out, Lse | None]:
        """`attend` without its checks, for arrays that are known to be like the prepared ones.

        To be called under `torch.no_grad`.
        """
        for name, array in batch_arrays(self.batch).items():  # backends may read it again
            require_dense(name, array)
        return computed(self, as_loaded(query, cache), cache, options)


@uncompiled
@lists_arrays
def prepare(
    query: Query,
    cache: KVCache,
    batch: BatchMetadata,
    spec: AttentionSpec = AttentionSpec(),
    *,
    backend: str | Backend | Crossings | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    **arrays: Tensor | Selection | None,
) -> Step:
    """Does once what all layers of a step need: checks, chooses the backend, works out the batch.

    Layers with the same spec and sizes share it: call `attend(query, cache)` of the result for
    each. Of query and cache only shapes, dtypes, strides and the device matter here, of the arrays
    (the keywords `sinks`, `bias`, `selection` of `paged_attention`) only whether `attend` will be
    given them, and the shape.

    Raises:
      InvalidInputError, UnsupportedError, BackendUnavailableError: as `paged_attention`.

    >>> from pagedattn import make_batch
    >>> layers = [KVCache(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8)) for _ in range(3)]
    >>> query, batch = torch.ones(1, 2, 8), make_batch([1], [4], [[1, 0]], block_size=4)
    >>> step = prepare(query, layers[0], batch)
    >>> [step.attend(query, cache)[0].shape for cache in layers][-1]
    torch.Size([1, 2, 8])
    """
    flags = return_lse, batch_invariant
    return prepared(query, cache, batch, spec, backend, flags, given_of(arrays))[0]


def prepared(
    query, cache, batch, spec, backend, flags: Flags, given: Mapping[str, Any]
) -> tuple[Step, Tensor]:
    """`prepare` for those who are uncompiled themselves, and the query `as_loaded`."""
    call, sequences, query = described(query, cache, batch, spec, flags, given)
    with on_device_of(query):
        chosen = select.select(backend, call, Framework.TORCH)
        plan = None if call.is_empty else chosen.plan(chosen.native_call(call), sequences)
        live = emulate.live_tokens(call, sequences)
    return Step(call, chosen, plan, sequences, live), query


def computed(
    step: Step, query: Query, cache: KVCache, options: Mapping[str, Any]
) -> tuple[Out, Lse | None]:
    """`Step.run` for the arrays that it was prepared for a moment ago, the query `as_loaded`."""
    backend = _EMPTY if step.call.is_empty else step.backend
    errors = _refused() if step.call.fake_tensors else contextlib.nullcontext()
    # Triton's and xFormers' kernels start on the current device.
    with on_device_of(query), without_autocast(query.device), errors:
        if options:
            options = for_backends(options, step.batch, step.call.block_size)
        return emulate.attend(backend, step.call, query, cache, step.plan, step.live, options)


def described(
    query, cache, batch, spec, flags: Flags, options: Mapping[str, Any]
) -> tuple[Call, Sequences, Tensor]:
    """The call, validated, its batch on the query's device, and the query `as_loaded`."""
    validate_batch.a_batch(batch)
    _require_layer(query, cache)
    # Checked before the batch moves to the query's device, while values on the CPU can be read.
    tensors = batch_on(batch, None)
    validate.attention(query, cache, tensors, spec, *flags)
    if options:
        _require_options(query, **options)
        validate_fit(options, cache, tensors)
    query = as_loaded(query, cache)
    call = call_of(query, cache, tensors, spec, *flags, **options)
    return call, _owned(batch, tensors, query.device), query


def _require_layer(query, cache):
    """Requires tensors on one device, without gradients."""
    arrays = {"query": query, **arrays_of(cache)}
    require_tensors(**arrays)
    require_beside("query", query, **arrays)
    require_alike(**arrays)
    require_no_grad(*arrays.values())


def _require_options(query, **given) -> None:
    tensors = _tensors_of(given)
    require_tensors(**tensors)
    require_no_grad(*tensors.values())
    validate_arrays(given, query)
    require_beside("query", query, **tensors)
    require_alike(query=query, **tensors)


def _tensors_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of options, those in records too, by the names that errors call them."""
    tensors = {}
    for name, value in given.items():
        if dataclasses.is_dataclass(value):
            own = (f.name for f in dataclasses.fields(value) if not f.metadata.get("static"))
            tensors |= {f"{name}.{field}": getattr(value, field) for field in own}
        else:
            tensors[name] = value
    return tensors


def _owned(batch: BatchMetadata, tensors: BatchMetadata[Tensor], device) -> Sequences:
    """The batch's tensors on a device, in memory that torch owns if that is a GPU's.

    Another framework would free its memory as soon as the caller drops the batch: it does not know
    that torch's kernels, which run in the background, still read it.
    """
    lens, tree = tensors.seq_lens, tensors.tree
    owned = Sequences(tensors.block_tables, lens, tensors.query_start_loc, tree=tree)
    if {*map(operator.attrgetter("device"), jax.tree.leaves(owned))} != {device}:
        owned = jax.tree.map(lambda array: tensor("batch", array, device), owned)
    if device.type == "cuda" and not all(isinstance(x, Tensor) for x in jax.tree.leaves(batch)):
        owned = jax.tree.map(Tensor.clone, owned)
        torch.cuda.current_stream(device).synchronize()
    return owned


def as_loaded(query: Tensor, cache: KVCache) -> Tensor:
    """The query with stride 1 along head_dim, as kernels load it.

    Wholly dense if the cache is quantised: so is what a scale or a wider dtype makes of it.
    """
    return with_dense_rows(query) if query.dtype is cache.key.dtype else query.contiguous()


@contextlib.contextmanager
def _refused():
    """A context for tensors that stand for others, whose operations may raise anything."""
    try:
        yield
    except PagedAttentionError:
        raise
    except Exception as error:
        raise UnsupportedError(
            "tensors without memory (fake, functional, wrapping) are computed with torch's own "
            f"operations, one of which refused them: {error}"
        ) from error


def _no_results(call, query, *_arrays, **_options):
    out = query.new_zeros(call.out_shape)
    return out, query.new_full(call.lse_shape, -torch.inf, dtype=torch.float32)


# Runs the calls whose shapes leave no query that could see a key.
_EMPTY = Backend("empty", frozenset({"return_lse", "batch_invariant"}), _no_results)
