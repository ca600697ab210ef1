"""One call of paged attention as plain numpy arrays: input of the oracle and of every backend."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import features, oracle, visibility


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Everything that one attention call reads.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float32, bfloat16 or float16; rows past the last
            sequence are padding.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, dtype of `query` or
            quantised; `[..., head_dim // 2]` in uint8, two numbers of four bits each.
        value_cache: like `key_cache`, with any number of columns; None in a latent cache.
        block_tables: one row of block ids for each sequence; entries past
            `ceil(seq_len / block_size)` may hold anything.
        query_lens: new tokens of each sequence.
        seq_lens: keys of each sequence, the new tokens included.
        spec: an `AttentionSpec`.
        key_scale, value_scale: float32, of quantised caches: a number or `[num_kv_heads]`, or None;
            or those of tokens, as in a `KVCache`.
        max_query_len: static bound to give to `make_batch`; None takes its default.
        sinks: float32 `[num_heads]`, or None.
        bias: `[num_tokens, num_heads or 1, max_keys]`, float32 or dtype of `query`, or None.
        value_dim: of a latent cache, how many of the keys' columns are the values.
        selection: int32 `[num_seqs, num_kv_heads, n]`, blocks of each sequence, or None.
        parents: int `[num_tokens]`, as `make_batch` takes them, or None; rows past the last
            sequence are padding.
    """

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray | None
    block_tables: Sequence[Sequence[int]] | np.ndarray
    query_lens: Sequence[int]
    seq_lens: Sequence[int]
    spec: Any
    max_query_len: int | None = None
    sinks: np.ndarray | None = None
    bias: np.ndarray | None = None
    key_scale: np.ndarray | None = None
    value_scale: np.ndarray | None = None
    value_dim: int | None = None
    selection: np.ndarray | None = None
    parents: np.ndarray | None = None

    @property
    def out_shape(self) -> tuple[int, ...]:
        """`[num_tokens, num_heads, value_dim]`."""
        plane = self.value_cache
        columns = (self.value_dim or 0) if plane is None else oracle.width(plane)
        return (*self.query.shape[:2], columns)

    @property
    def token_scales(self) -> bool:
        """Whether the scales are those of tokens."""
        return self.key_scale is not None and self.key_scale.ndim > 1

    @property
    def by_slot(self) -> dict[str, np.ndarray]:
        """The arrays with a row for each slot, by their fields: caches, and per-token scales."""
        names = ["key_cache", "value_cache"]
        names += ["key_scale", "value_scale"] if self.token_scales else []
        arrays = {name: getattr(self, name) for name in names}
        return {name: array for name, array in arrays.items() if array is not None}

    @property
    def block_size(self) -> int:
        return self.key_cache.shape[1]

    @functools.cached_property
    def query_start_loc(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.query_lens, dtype=np.int64)])

    @property
    def context_lens(self) -> list[int]:
        """`seq_len - query_len`; negative in cross attention with more queries than keys."""
        return [int(n) - int(q) for n, q in zip(self.seq_lens, self.query_lens, strict=True)]

    @property
    def visible_slots(self) -> np.ndarray:
        """bool `[num_blocks, block_size, num_kv_heads]`: slots that some query sees."""
        names = ("num_blocks", "block_size", "num_kv_heads")
        sizes = dict(zip(names, self.key_cache.shape, strict=False))
        seen = self.block_tables, self.query_lens, self.seq_lens, self.spec
        return visibility.visible_slots(*seen, self.bias, self.selection, self.parents, **sizes)

    @property
    def arrays(self) -> dict[str, Any]:
        """The options of the call that are arrays, by the keywords of `paged_attention`."""
        given = {name: getattr(self, name) for name in features.ARRAYS}
        return {
            name: features.ARRAYS[name].as_given(array)
            for name, array in given.items()
            if array is not None
        }

    def replace(self, **changes: Any) -> "Problem":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def poisoned(self, poison: float = np.nan) -> "Problem":
        """The same problem with `poison` in all that no query sees, and in the padding rows."""
        query = self.query.copy()
        query[self.query_start_loc[-1] :] = poison
        hidden = ~self.visible_slots
        held = {name: _poisoned(array, hidden, poison) for name, array in self.by_slot.items()}
        return self.replace(query=query, **held, **self._hidden(poison))

    def _hidden(self, poison: float) -> dict[str, np.ndarray]:
        """The bias with `poison` for keys that a token does not see, and in the padding rows."""
        if self.bias is None:
            return {}
        bias = np.full_like(self.bias, poison)
        for s, seq_len in enumerate(self.seq_lens):
            rows = slice(*self.query_start_loc[s : s + 2])
            family = None if self.parents is None else self.parents[rows]
            lens = rows.stop - rows.start, int(seq_len)
            seen = visibility.visible_keys(*lens, self.spec, family)[:, None]
            bias[rows, :, :seq_len] = np.where(seen, self.bias[rows, :, :seq_len], poison)
        return {"bias": bias}


def _poisoned(array: np.ndarray, hidden: np.ndarray, poison: float) -> np.ndarray:
    """The array with `poison` in hidden slots; integers have none, and get their least value."""
    hidden = hidden.reshape(*hidden.shape, *[1] * (array.ndim - hidden.ndim))
    if array.dtype in (np.int8, np.uint8):
        return np.where(hidden, np.int8(-128).view(array.dtype), array)
    return np.where(hidden, poison, array.astype(np.float64)).astype(array.dtype)
