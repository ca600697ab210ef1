"""The options that come as arrays, and what comes with a cache: a record each, in one table.

Nothing else in this folder names one of them. `ARRAYS` are keywords of `paged_attention`, and
fields of a `Call`; `OF_CACHES` are fields of a `KVCache`. What is linear in the query, the values
or the result is done around each backend that does not do it itself: `AROUND`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypedDict, TypeVar

from jaxtyping import Bool, Float

from .._arrays.checks import an_array
from .._arrays.inspect import describe, dtype_name, is_floating, known
from .._arrays.namespace import as_dtype, namespace, wide_dtype
from .._arrays.typing import is_torch
from ..cache.kv_cache import KVCache
from ..cache.quantise import scale_of_values, scaled
from ..errors import InvalidInputError
from ..selection.selection import (
    Selection,
    in_order,
    require_ascending,
    require_fit,
    require_selection,
)

A = TypeVar("A")  # the arrays of a framework


class Arrays(TypedDict, Generic[A], total=False):
    """The keywords of the arrays that a call may bring beside query and cache."""

    sinks: A | None
    bias: A | None
    selection: Selection | None


def _as_it_is(query, _given, _live):
    return query


def _always(_array) -> bool:
    return True


@dataclass(frozen=True)
class Around:
    """What the library does around a backend that does not do it itself.

    `given` is the array of an option, or the cache. `live`, bool `[num_tokens]`, says which tokens
    are no padding; rows of the others hold anything, and their gradients too.

    Fields:
      needs: the option that the backend must support for it; None if any backend will do.
      after: `after(out, lse, given, live)` gives the results of the call, from the backend's.
      before: `before(query, given, live)` gives the query for the backend.
      changes: what is different in the call that the backend gets, beside that it lacks the option.
      dtypes: the dtypes of queries that the backend gets, and gives out in, as another one.
      fact: the field of a `Call` that says whether the option may be there.
      needs_live: `needs_live(array)`, for an array of the batch, whether `live` is needed.
    """

    needs: str | None
    after: Callable[[Any, Any, Any, Any], tuple[Any, Any]]
    before: Callable[[Any, Any, Any], Any] = _as_it_is
    changes: Mapping[str, Any] = field(default_factory=dict)
    dtypes: Mapping[str, str] = field(default_factory=dict)
    fact: str | None = None
    needs_live: Callable[[Any], bool] = _always


@dataclass(frozen=True)
class Option:
    """An array that a call may bring beside query and cache.

    Fields:
      fact: `fact(array)` is what a `Call` says of it, in the field of the option's name.
      validate: `validate(array, query)` raises InvalidInputError unless they fit together.
      validate_fit: `validate_fit(array, cache, batch)` does for these, as far as values are
        known.
      as_given: `as_given(array, batch, block_size)` is what backends get of it.
      other_names: the keywords by which other libraries know it, and what to say to them.
      around: how it is done around a backend; None where only a backend can do it.
    """

    fact: Callable[[Any], Any]
    validate: Callable[[Any, Any], None]
    validate_fit: Callable[[Any, Any, Any], None] = lambda _array, _cache, _batch: None
    as_given: Callable[[Any, Any, int], Any] = lambda array, _batch, _block_size: array
    other_names: Mapping[str, str] = field(default_factory=dict)
    around: Around | None = None


@dataclass(frozen=True)
class OfCache:
    """What comes with a cache. A backend that does not support it gets the cache without it.

    Fields:
      fields: those of the `KVCache` that hold it; None in all of them where there is none.
      around: how it is done around a backend.
      unless: a fact of a call, if any, in which every backend gets them as they are.
    """

    fields: tuple[str, ...]
    around: Around
    unless: str | None = None


def given_of(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays that a call brings, of keywords of which others are None.

    Raises:
      TypeError: a keyword that no option has.
    """
    if unknown := arrays.keys() - ARRAYS.keys():
        raise TypeError(f"unexpected keyword argument {min(unknown)!r}")
    given = {}
    for name, array in arrays.items():
        if array is not None:
            given[name] = array
    return given


def facts_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `Call` that say which arrays it brings."""
    facts = {}
    for name, array in given.items():
        facts[name] = ARRAYS[name].fact(array)
    return facts


def validate_arrays(given: Mapping[str, Any], query) -> None:
    """Requires arrays that fit a query that `validate.attention` has accepted."""
    for name, array in given.items():
        ARRAYS[name].validate(array, query)


def validate_fit(given: Mapping[str, Any], cache, batch) -> None:
    """Requires arrays that fit a cache and a batch, and its lengths where those are known."""
    for name, array in given.items():
        ARRAYS[name].validate_fit(array, cache, batch)


def for_backends(given: Mapping[str, Any], batch, block_size: int) -> dict[str, Any]:
    """The arrays as backends get them; `batch` are the sequences that they attend to."""
    return {name: ARRAYS[name].as_given(array, batch, block_size) for name, array in given.items()}


def _sinks(sinks, query):
    an_array("sinks", sinks)
    num_heads = query.shape[1]
    if not (sinks.shape == (num_heads,) and is_floating(sinks.dtype)):
        raise InvalidInputError(
            f"sinks must be floating [num_heads], one for each of the {num_heads} query heads, got "
            f"{describe(sinks)}"
        )


def _with_sinks(
    out: Float[Any, "num_tokens num_heads head_dim"],
    lse: Float[Any, "num_tokens num_heads"],
    sinks: Float[Any, "num_heads"],
    live: Bool[Any, "num_tokens"],
) -> tuple[Float[Any, "num_tokens num_heads head_dim"], Float[Any, "num_tokens num_heads"]]:
    """The results with a sink in each head's softmax: `merge_states(out, lse, 0, sinks)`."""
    xp = namespace(out)
    seen = lse > -xp.inf
    known = xp.where(seen, lse, 0.0)  # -inf - -inf is NaN, in a gradient too
    sinks = as_dtype(sinks, lse.dtype)[None]
    # That is `logaddexp`, whose last elements of an array have other bits in torch 2.13.
    total = xp.maximum(known, sinks) + xp.log1p(xp.exp(-abs(known - sinks)))
    weight = xp.where(live[:, None], xp.exp(known - total), 0)[..., None]
    wide = as_dtype(out, wide_dtype(out))
    out = as_dtype(wide * as_dtype(weight, wide.dtype), out.dtype)
    return out, xp.where(live[:, None], xp.where(seen, total, sinks), -xp.inf)


def _bias(bias, query):
    an_array("bias", bias)
    if dtype_name(bias.dtype) == "bool":
        raise InvalidInputError(
            f"bias must be floating, got {describe(bias)}: where True shows a key, jnp.where(bias, "
            "0.0, -jnp.inf) is the bias"
        )
    num_tokens, num_heads, _ = query.shape
    fits = bias.ndim == 3 and bias.shape[0] == num_tokens and bias.shape[1] in (1, num_heads)
    dtypes = ("float32", dtype_name(query.dtype))
    if not (fits and bias.shape[2] > 0 and dtype_name(bias.dtype) in dtypes):
        raise InvalidInputError(
            f"bias must be [num_tokens, num_heads or 1, max_keys] = [{num_tokens}, {num_heads} or "
            f"1, at least 1], float32 or of the query's dtype, got {describe(bias)}"
        )


def _columns(bias, _cache, batch):
    """Requires, where lengths are known, a column for each key of a sequence."""
    lens = known(batch.seq_lens)
    if lens is not None and not lens.max(initial=0) <= bias.shape[2]:
        raise InvalidInputError(
            f"bias must have a column for each key of the longest sequence, got {describe(bias)} "
            f"and seq_lens {lens}"
        )


def _fits(selection, cache, batch):
    require_fit(selection, batch.num_seqs, cache.num_kv_heads)
    if selection.ascending:
        require_ascending(known(selection.blocks))


def _in_order(selection, batch, block_size):
    return in_order(selection, batch.seq_lens, block_size, batch.max_blocks)


def _query_with_scales(query, cache: KVCache, live):
    """A key's scale is a factor on its logits.

    The gradient of a scale sums over all rows, so NaN in those of padding tokens is taken out.
    """
    if cache.key_scale is None:
        return query
    return scaled(_without_padding(query, live), cache.key_scale, cache.num_kv_heads)


def _out_with_scales(out, lse, cache: KVCache, live):
    """A value's scale is a factor on what is summed."""
    scale = scale_of_values(cache)
    if scale is not None:
        out = _without_padding(scaled(out, scale, cache.num_kv_heads), live)
    return out, lse


def _without_padding(rows, live):
    """The rows, 0 for padding tokens."""
    return rows if live is None else namespace(rows).where(live[:, None, None], rows, 0)


_HIDES = "bias=jnp.where(mask, 0.0, -jnp.inf), [num_tokens, num_heads or 1, max_keys], hides keys"
_ADDS = "bias is added to the logits, [num_tokens, num_heads or 1, max_keys]"
_MASKS = ("mask", "attn_mask", "attention_mask")
ARRAYS: dict[str, Option] = {
    "sinks": Option(
        lambda sinks: True,
        _sinks,
        other_names=dict.fromkeys(
            ("s_aux", "attention_sinks", "learnable_sink"), "sinks is one for each head"
        ),
        around=Around("return_lse", _with_sinks, changes={"return_lse": True}, fact="sinks"),
    ),
    "bias": Option(
        lambda bias: tuple(bias.shape),
        _bias,
        _columns,
        other_names=dict.fromkeys(_MASKS, _HIDES) | {"attn_bias": _ADDS},
    ),
    "selection": Option(
        lambda selection: tuple(selection.blocks.shape),
        lambda selection, _query: require_selection(selection),
        _fits,
        _in_order,
        other_names=dict.fromkeys(
            ("block_indices", "selected_blocks", "topk_indices"),
            "selection=Selection(blocks) chooses the blocks of each sequence and KV head",
        ),
    ),
}

SCALES = "scales"
# The innermost first: what is done around a backend with the cache comes before what is done with
# the arrays of the call.
OF_CACHES: dict[str, OfCache] = {
    SCALES: OfCache(
        ("key_scale", "value_scale"),
        Around(
            "cache_dtype",
            _out_with_scales,
            _query_with_scales,
            dtypes={"float16": "float32"},  # which has not the range of queries times scales
            fact="cache_dtype",
            needs_live=lambda array: not is_torch(array),  # its tensors have no gradients
        ),
        unless="token_scales",
    ),
}
AROUND: dict[str, Around] = {
    **{name: of_cache.around for name, of_cache in OF_CACHES.items()},
    **{name: option.around for name, option in ARRAYS.items() if option.around is not None},
}
