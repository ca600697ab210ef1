"""The float64 reference: walks the block table token by token, shares no code with the library."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from .visibility import chosen_keys, standing, visible_keys, wanted_keys


class Head(NamedTuple):
    """What one query head of one sequence sees, in float64.

    `rows` is a slice of the token axis; query is `[q, head_dim]`, keys are `[k, head_dim]` and
    values `[k, value_dim]`, both 0 where no query of the head looks, distance and visible
    `[q, k]`. sink is a logit without a value, -inf for none, and bias `[q, k]` is added to the
    logits.
    """

    index: int
    rows: slice
    query: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    distance: np.ndarray
    visible: np.ndarray
    sink: float
    bias: np.ndarray


def walk(
    pool: np.ndarray,
    table: Sequence[int] | np.ndarray,
    wanted: np.ndarray,
    scale: np.ndarray | None,
) -> np.ndarray:
    """float64 `[k, num_kv_heads, dim]`: the wanted tokens one by one, zeros for the others.

    wanted is bool `[k, num_kv_heads]`.
    """
    block_size, num_kv_heads = pool.shape[1:3]
    tokens = np.zeros((len(wanted), num_kv_heads, width(pool)))
    for j in np.flatnonzero(wanted.any(1)):
        slot, heads = (int(table[j // block_size]), j % block_size), wanted[j]
        tokens[j, heads] = numbers(pool[slot][heads])
        if scale is not None:
            by_head = factors(scale if np.ndim(scale) < 2 else scale[slot], tokens[j].shape)
            tokens[j, heads] *= by_head[heads]
    return tokens


def factors(scale: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """float64 `shape`: one scale, or that of each head, or of each group of a head's columns."""
    num_kv_heads, dim = shape
    by_head = np.float64(scale)
    by_head = np.full((num_kv_heads, 1), by_head) if by_head.size == 1 else by_head
    by_head = by_head.reshape(num_kv_heads, -1)
    return np.repeat(by_head, dim // by_head.shape[1], axis=1)


def numbers(held: np.ndarray) -> np.ndarray:
    """float64: what rows hold. uint8 is two numbers of four bits, those of the first half low."""
    if held.dtype != np.uint8:
        return held.astype(np.float64)
    four = np.concatenate([held % 16, held // 16], axis=-1).astype(np.float64)
    return np.where(four < 8, four, four - 16)


def width(pool: np.ndarray) -> int:
    """The numbers in a row."""
    return pool.shape[3] * (2 if pool.dtype == np.uint8 else 1)


def heads(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray | None,
    block_tables: Sequence[Sequence[int]] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    query_start_loc: Sequence[int] | np.ndarray,
    spec: Any,
    sinks: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    key_scale: np.ndarray | None = None,
    value_scale: np.ndarray | None = None,
    value_dim: int | None = None,
    selection: np.ndarray | None = None,
    parents: np.ndarray | None = None,
) -> Iterator[Head]:
    """Every query head of every sequence, with exactly the keys that the contract lets it see."""
    _, block_size, num_kv_heads, _ = key_cache.shape
    group = query.shape[1] // num_kv_heads
    for s, seq_len in enumerate(int(n) for n in seq_lens):
        rows = slice(int(query_start_loc[s]), int(query_start_loc[s + 1]))
        query_len = rows.stop - rows.start
        family = None if parents is None else parents[rows]
        visible = visible_keys(query_len, seq_len, spec, family)
        chosen = chosen_keys(selection, s, seq_len, block_size, num_kv_heads)
        wanted = wanted_keys(visible, bias, rows)[:, None] & chosen
        keys = walk(key_cache, block_tables[s], wanted, key_scale)
        if value_cache is None:
            values = keys[:, :, :value_dim]
        else:
            values = walk(value_cache, block_tables[s], wanted, value_scale)
        p, j = standing(query_len, seq_len, family)
        distance = np.abs(p[:, None] - j[None, :])
        for h in range(query.shape[1]):
            q = query[rows, h].astype(np.float64)
            kv = h // group
            sink = -np.inf if sinks is None else float(sinks[h])
            added = bias_of(bias, h, rows, seq_len)
            seen = visible & chosen[:, kv]
            yield Head(h, rows, q, keys[:, kv], values[:, kv], distance, seen, sink, added)


def bias_of(bias: np.ndarray | None, head: int, rows: slice, seq_len: int) -> np.ndarray:
    """float64 `[q, k]`: the bias of a head's queries; 0 if there is none."""
    if bias is None:
        return np.zeros((rows.stop - rows.start, seq_len))
    return bias[rows, min(head, bias.shape[1] - 1), :seq_len].astype(np.float64)


def logits(head: Head, spec: Any, product: Callable = np.matmul) -> np.ndarray:
    """`[q, k]`: scale, then cap, then ALiBi and the bias, then the mask; of the product's dtype."""
    scale = head.query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    score = scale * product(head.query, head.keys.T)
    if spec.logits_soft_cap is not None:
        score = spec.logits_soft_cap * np.tanh(score / spec.logits_soft_cap)
    if spec.alibi_slopes is not None:
        score = score - spec.alibi_slopes[head.index] * head.distance
    score = score + head.bias
    return np.where(head.visible, score, -np.inf)


def softmax(score: np.ndarray, sink: float) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities `[q, k]` and natural-log lse `[q]`, which counts the sink.

    A row without keys gives 0 and the sink: -inf if there is none.
    """
    top = score.max(-1, initial=sink)
    shift = np.where(np.isfinite(top), top, 0)
    weight = np.exp(score - shift[:, None])
    total = weight.sum(-1) + np.exp(sink - shift)
    seen = total > 0
    lse = np.where(seen, shift + np.log(np.where(seen, total, 1)), -np.inf)
    return weight / np.where(seen, total, 1)[:, None], lse


def weighted(head: Head, probability: np.ndarray, product: Callable = np.matmul) -> np.ndarray:
    """`[q, value_dim]`: the head's out."""
    return product(probability, head.values)


def reference_attention(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray | None,
    block_tables: Sequence[Sequence[int]] | np.ndarray,
    seq_lens: Sequence[int] | np.ndarray,
    query_start_loc: Sequence[int] | np.ndarray,
    spec: Any,
    sinks: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    key_scale: np.ndarray | None = None,
    value_scale: np.ndarray | None = None,
    value_dim: int | None = None,
    selection: np.ndarray | None = None,
    parents: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Paged attention in float64, slowly and plainly.

    Args:
        query: `[num_tokens, num_heads, head_dim]`.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`; only slots that some query
            sees are read, so the rest may hold NaN. uint8 `[..., head_dim // 2]` is two numbers of
            four bits.
        value_cache: like `key_cache`, with value_dim columns; None: they are columns of the keys.
        block_tables: `[num_seqs, max_blocks]` or rows of different length.
        seq_lens: `[num_seqs]`, keys of each sequence, the new tokens included.
        query_start_loc: `[num_seqs + 1]`; rows of `query` from its last value on are padding.
        spec: an `AttentionSpec`.
        sinks: `[num_heads]`, or None.
        bias: `[num_tokens, num_heads or 1, max_keys]`, or None.
        key_scale, value_scale: what the caches' keys and values are multiplied by, a number or
            `[num_kv_heads]`, or None; or that of each token, `[num_blocks, block_size,
            num_kv_heads]`, or of each group of its columns, `[..., groups]`.
        value_dim: without a value_cache the first columns of the keys that are values.
        selection: int `[num_seqs, num_kv_heads, n]`, a set of blocks of the sequence for each KV
            head, which sees no others; or None.
        parents: `[num_tokens]`, the index among its sequence's new tokens of the one that each
            follows, -1 for none; or None, where each follows the one before it.

    Returns:
        out float64 `[num_tokens, num_heads, value_dim]`, and lse float64 `[num_tokens, num_heads]`;
        0 and -inf in padding rows, 0 and the sink or -inf in rows that see no key.

    Example:
        >>> import numpy as np
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import reference_attention
        >>> cache = np.ones((3, 4, 1, 8))
        >>> out, lse = reference_attention(
        ...     np.zeros((1, 2, 8)), cache, cache, [[2]], [4], [0, 1], AttentionSpec()
        ... )
        >>> out[0, 0, 0], np.exp(lse[0, 0]).round(6)
        (np.float64(1.0), np.float64(4.0))
    """
    columns = (value_dim or 0) if value_cache is None else width(value_cache)
    out = np.zeros((*query.shape[:2], columns))
    lse = np.full(query.shape[:2], -np.inf)
    args = (query, key_cache, value_cache, block_tables, seq_lens, query_start_loc)
    others = sinks, bias, key_scale, value_scale, value_dim, selection, parents
    for head in heads(*args, spec, *others):
        probability, lse[head.rows, head.index] = softmax(logits(head, spec), head.sink)
        out[head.rows, head.index] = weighted(head, probability)
    return out, lse


def reference_write(
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    slot_mapping: Sequence[int] | np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """New caches with token t at slot `slot_mapping[t]`; slots outside the cache write nothing.

    Example:
        >>> cache, row = np.zeros((2, 2, 1, 1)), np.ones((1, 1, 1))
        >>> reference_write(cache, cache, row, row, [3])[0].ravel().tolist()
        [0.0, 0.0, 0.0, 1.0]
    """
    key_cache, value_cache = key_cache.copy(), value_cache.copy()
    num_blocks, block_size = key_cache.shape[:2]
    for t, slot in enumerate(int(s) for s in slot_mapping):
        if 0 <= slot < num_blocks * block_size:
            key_cache[slot // block_size, slot % block_size] = key[t]
            value_cache[slot // block_size, slot % block_size] = value[t]
    return key_cache, value_cache
