"""The types of the two entry points, of any framework's arrays: the result follows `return_lse`.

And the keywords that they have not.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Literal, Protocol, TypeVar, Unpack, cast, overload

from ..batch.metadata import BatchMetadata
from ..cache.kv_cache import KVCache
from ..errors import InvalidInputError
from ..spec import AttentionSpec
from .backend import Backend
from .crossings import Crossings
from .options import ARRAYS, A, Arrays

Starts = TypeVar("Starts", contravariant=True)  # what starts may be given as
S = TypeVar("S")
Fn = TypeVar("Fn", bound=Callable)


def typed_as(signature: type[S]) -> Callable[[Callable], S]:
    """A decorator: type checkers take the function for one of this signature."""
    del signature
    return lambda function: cast(S, function)


def lists_arrays(function: Fn) -> Fn:
    """`help` and `inspect.signature` list each keyword of the function's `**arrays`."""
    *others, arrays = inspect.signature(function).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    listed = [arrays.replace(name=n, kind=kind, default=None, annotation=Any) for n in ARRAYS]
    vars(function)["__signature__"] = inspect.Signature([*others, *listed])
    return function


def without_other_names(function: Fn) -> Fn:
    """Refuses keywords by which other libraries know an argument, and says what it is here."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        if misnamed := kwargs.keys() & OTHER_NAMES.keys():
            name = min(misnamed)
            raise InvalidInputError(f"{name} is no keyword of this function: {OTHER_NAMES[name]}")
        return function(*args, **kwargs)

    return cast(Fn, call)


def _of_spec(field: str) -> str:
    return f"it belongs to the formula, spec=AttentionSpec({field}=...)"


OTHER_NAMES = {
    **{field.name: _of_spec(field.name) for field in fields(AttentionSpec)},
    **dict.fromkeys(("softmax_scale", "sm_scale", "scaling"), _of_spec("scale")),
    **dict.fromkeys(("is_causal",), _of_spec("causal")),
    "window": _of_spec("sliding_window"),
    **dict.fromkeys(
        ("window_size", "window_left", "local_window_size"),
        f"{_of_spec('sliding_window')}, left + 1, since the token itself counts here",
    ),
    **dict.fromkeys(
        ("softcap", "soft_cap", "logits_soft_capping", "attn_logits_soft_cap"),
        _of_spec("logits_soft_cap"),
    ),
    **dict.fromkeys(("return_softmax_lse", "save_residuals"), "return_lse=True gives the lse too"),
}
for _option in ARRAYS.values():
    OTHER_NAMES |= _option.other_names


class Options(Arrays[A], total=False):
    """The keywords of an attention call that do not change what kind of result it gives."""

    backend: str | Backend | Crossings | None
    batch_invariant: bool


class PagedAttention(Protocol[A]):
    """The type of `paged_attention`."""

    @overload
    def __call__(
        self,
        query: A,
        cache: KVCache,
        batch: BatchMetadata,
        spec: AttentionSpec = ...,
        *,
        return_lse: Literal[False] = ...,
        **options: Unpack[Options[A]],
    ) -> A: ...
    @overload
    def __call__(
        self,
        query: A,
        cache: KVCache,
        batch: BatchMetadata,
        spec: AttentionSpec = ...,
        *,
        return_lse: Literal[True],
        **options: Unpack[Options[A]],
    ) -> tuple[A, A]: ...
    @overload
    def __call__(
        self,
        query: A,
        cache: KVCache,
        batch: BatchMetadata,
        spec: AttentionSpec = ...,
        *,
        return_lse: bool,
        **options: Unpack[Options[A]],
    ) -> A | tuple[A, A]: ...


class RaggedOptions(Options[A], total=False):
    """Those of a call without a batch, which has the batch's."""

    parents: Any


class RaggedAttention(Protocol[A, Starts]):
    """The type of `ragged_attention`."""

    @overload
    def __call__(
        self,
        query: A,
        key: A,
        value: A,
        query_start_loc: Starts,
        key_start_loc: Starts,
        spec: AttentionSpec = ...,
        *,
        max_query_len: int,
        max_key_len: int,
        return_lse: Literal[False] = ...,
        **options: Unpack[RaggedOptions[A]],
    ) -> A: ...
    @overload
    def __call__(
        self,
        query: A,
        key: A,
        value: A,
        query_start_loc: Starts,
        key_start_loc: Starts,
        spec: AttentionSpec = ...,
        *,
        max_query_len: int,
        max_key_len: int,
        return_lse: Literal[True],
        **options: Unpack[RaggedOptions[A]],
    ) -> tuple[A, A]: ...
    @overload
    def __call__(
        self,
        query: A,
        key: A,
        value: A,
        query_start_loc: Starts,
        key_start_loc: Starts,
        spec: AttentionSpec = ...,
        *,
        max_query_len: int,
        max_key_len: int,
        return_lse: bool,
        **options: Unpack[RaggedOptions[A]],
    ) -> A | tuple[A, A]: ...
