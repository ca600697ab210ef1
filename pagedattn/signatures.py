"""The types of the two entry points, of any framework's arrays: the result follows `return_lse`."""

from collections.abc import Callable
from typing import Generic, Literal, Protocol, TypedDict, TypeVar, Unpack, cast, overload

from .backend import Backend
from .batch import BatchMetadata
from .cache import KVCache
from .spec import AttentionSpec

A = TypeVar("A")  # the arrays of a framework
Starts = TypeVar("Starts", contravariant=True)  # what starts may be given as
S = TypeVar("S")


def typed_as(signature: type[S]) -> Callable[[Callable], S]:
    """A decorator: type checkers take the function for one of this signature."""
    del signature
    return lambda function: cast(S, function)


class Options(TypedDict, Generic[A], total=False):
    """The keywords of an attention call that do not change what kind of result it gives."""

    backend: str | Backend | None
    sinks: A | None
    bias: A | None


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
        **options: Unpack[Options[A]],
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
        **options: Unpack[Options[A]],
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
        **options: Unpack[Options[A]],
    ) -> A | tuple[A, A]: ...
