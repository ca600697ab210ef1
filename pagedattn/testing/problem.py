"""One call of paged attention as plain numpy arrays: input of the oracle and of every backend."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import features, oracle


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Everything that one attention call reads.

    Args:
        query: `[num_tokens, num_heads, head_dim]`, float32, bfloat16 or float16; rows past the last
            sequence are padding.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, dtype of `query` or
            quantised.
        value_cache: like `key_cache`, with any number of columns; None in a latent cache.
        block_tables: one row of block ids for each sequence; entries past
            `ceil(seq_len / block_size)` may hold anything.
        query_lens: new tokens of each sequence.
        seq_lens: keys of each sequence, the new tokens included.
        spec: an `AttentionSpec`.
        key_scale, value_scale: float32, of quantised caches: a number or `[num_kv_heads]`, or None.
        max_query_len: static bound to give to `make_batch`; None takes its default.
        sinks: float32 `[num_heads]`, or None.
        bias: `[num_tokens, num_heads or 1, max_keys]`, float32 or dtype of `query`, or None.
        value_dim: of a latent cache, how many of the keys' columns are the values.
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

    @property
    def out_shape(self) -> tuple[int, ...]:
        """`[num_tokens, num_heads, value_dim]`."""
        plane = self.value_cache
        plane = self.key_cache[..., : self.value_dim] if plane is None else plane
        return (*self.query.shape[:2], plane.shape[3])

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
        """bool `[num_blocks, block_size]`: slots that some query sees."""
        num_blocks, block_size = self.key_cache.shape[:2]
        lens = self.query_lens, self.seq_lens
        sizes = {"num_blocks": num_blocks, "block_size": block_size}
        return oracle.visible_slots(self.block_tables, *lens, self.spec, self.bias, **sizes)

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """The options of the call that are arrays, by the keywords of `paged_attention`."""
        given = {name: getattr(self, name) for name in features.ARRAYS}
        return {name: array for name, array in given.items() if array is not None}

    def replace(self, **changes: Any) -> "Problem":
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def poisoned(self, poison: float = np.nan) -> "Problem":
        """The same problem with `poison` in all that no query sees, and in the padding rows."""
        query = self.query.copy()
        query[self.query_start_loc[-1] :] = poison
        hidden = ~self.visible_slots[:, :, None, None]
        key, value = (_poisoned(x, hidden, poison) for x in (self.key_cache, self.value_cache))
        return self.replace(query=query, key_cache=key, value_cache=value, **self._hidden(poison))

    def _hidden(self, poison: float) -> dict[str, np.ndarray]:
        """The bias with `poison` for keys that a token does not see, and in the padding rows."""
        if self.bias is None:
            return {}
        bias = np.full_like(self.bias, poison)
        for s, seq_len in enumerate(self.seq_lens):
            rows = slice(*self.query_start_loc[s : s + 2])
            seen = oracle.visible_keys(rows.stop - rows.start, int(seq_len), self.spec)[:, None]
            bias[rows, :, :seq_len] = np.where(seen, self.bias[rows, :, :seq_len], poison)
        return {"bias": bias}


def _poisoned(plane: np.ndarray | None, hidden: np.ndarray, poison: float) -> Any:
    """The plane with `poison` where it is hidden; int8 has none, and gets its least value."""
    if plane is None:
        return None
    if plane.dtype == np.int8:
        return np.where(hidden, np.int8(-128), plane)
    return np.where(hidden, poison, plane.astype(np.float64)).astype(plane.dtype)
