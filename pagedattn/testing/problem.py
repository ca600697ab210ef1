"""One call of paged attention as plain numpy arrays: input of the oracle and of every backend."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pagedattn.features import ARRAYS
from pagedattn.ragged import cdiv

from . import oracle


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
        given = {name: getattr(self, name) for name in ARRAYS}
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


def random_problem(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    spec: Any,
    *,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    block_size: int = 4,
    num_blocks: int | None = None,
    pad_tokens: int | None = None,
    dtype: Any = np.float32,
    poison: float | None = np.nan,
    block_tables: Sequence[Sequence[int]] | np.ndarray | None = None,
    max_query_len: int | None = None,
    arrays: Sequence[str] = (),
    cache_dtype: Any = None,
    value_dim: int | None = None,
    latent: bool = False,
    seed: int = 0,
) -> Problem:
    """A problem with unit normal values and shuffled blocks, poisoned wherever no query looks.

    `num_blocks` defaults to three more than are needed; `pad_tokens` is the length of the token
    axis, by default without padding; `block_tables=None` draws tables without sharing; `arrays` are
    the options of `features.ARRAYS` that it has; `cache_dtype` quantises the caches, with a scale
    for each KV head of the keys, and one of the values; `value_dim` are the columns of the values,
    by default those of the keys, which hold them if it is a latent cache.

    Example:
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import random_problem
        >>> random_problem([1, 3], [9, 3], AttentionSpec()).query.shape
        (4, 4, 16)
    """
    rng = np.random.default_rng(seed)
    blocks = [cdiv(int(n), block_size) for n in seq_lens]
    num_blocks = sum(blocks) + 3 if num_blocks is None else num_blocks
    if block_tables is None:
        block_tables = random_tables(rng, blocks, num_blocks)
    num_tokens = int(sum(query_lens)) if pad_tokens is None else pad_tokens
    pool, value_dim = (num_blocks, block_size, num_kv_heads), value_dim or head_dim
    shapes = (num_tokens, num_heads, head_dim), (*pool, head_dim), (*pool, value_dim)
    query, key, value = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    lens = list(query_lens), list(seq_lens)
    problem = Problem(query, key, value, block_tables, *lens, spec, max_query_len)
    problem = problem.replace(value_cache=None, value_dim=value_dim) if latent else problem
    problem = problem.replace(**{name: _MAKERS[name](rng, problem) for name in arrays})
    problem = problem if cache_dtype is None else quantised_problem(problem, cache_dtype)
    return problem if poison is None else problem.poisoned(poison)


def quantised_problem(problem: Problem, cache_dtype: Any) -> Problem:
    """The problem with caches of eight bits: what they hold is what they are said to hold."""
    dtype, heads = np.dtype(cache_dtype), problem.key_cache.shape[2]
    step = np.float32(0.01 if dtype == np.int8 else 0.1)
    scales = np.resize(np.array([3, 2], np.float32), heads) * step, np.asarray(5 * step)
    key = {"key_cache": _held(problem.key_cache, scales[0], dtype), "key_scale": scales[0]}
    if problem.value_cache is None:
        return problem.replace(**key)
    value = _held(problem.value_cache, scales[1], dtype)
    return problem.replace(**key, value_cache=value, value_scale=scales[1])


def _held(plane, scale, dtype):
    held = plane.astype(np.float32) / scale.reshape(-1, 1)
    return (np.rint(held) if dtype == np.int8 else held).clip(-127, 127).astype(dtype)


def random_sinks(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Sinks of the size of logits; of several heads, the last has none."""
    sinks = rng.standard_normal(problem.query.shape[1]).astype(np.float32)
    sinks[1:][-1:] = -np.inf
    return sinks


def random_bias(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """A bias for each head that hides a third of the keys, and from a tenth of the rows all."""
    num_tokens, num_heads, _ = problem.query.shape
    width = max((len(row) for row in problem.block_tables), default=0) * problem.block_size
    bias = rng.standard_normal((num_tokens, num_heads, max(1, width))).astype(np.float32)
    bias[rng.random(bias.shape) < 1 / 3] = -np.inf
    bias[rng.random(bias.shape[:2]) < 1 / 10] = -np.inf
    return bias


_MAKERS = {"sinks": random_sinks, "bias": random_bias}


def random_tables(
    rng: np.random.Generator, blocks: Sequence[int], num_blocks: int
) -> list[list[int]]:
    """Rows of distinct block ids, `blocks[s]` of them in row s."""
    ids = rng.permutation(num_blocks).tolist()
    stops = np.cumsum(blocks).tolist()
    return [ids[stop - n : stop] for stop, n in zip(stops, blocks, strict=True)]
