"""What the float64 reference sees: which keys each new token looks at, one by one."""

from collections.abc import Sequence
from typing import Any

import numpy as np


def lines(query_len: int, parents: np.ndarray | None) -> list[list[int]]:
    """For each new token of a sequence its line of descent, from itself to the first one."""
    if parents is None:
        return [list(range(i, -1, -1)) for i in range(query_len)]
    found: list[list[int]] = []
    for i in range(query_len):
        parent = int(parents[i])
        found.append([i, *([] if parent < 0 else found[parent])])
    return found


def standing(
    query_len: int, seq_len: int, parents: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """The positions of the new tokens `[query_len]`, and of the keys `[seq_len]`."""
    context_len = seq_len - query_len
    depths = np.array([len(line) - 1 for line in lines(query_len, parents)], int)
    p, j = context_len + depths, np.arange(seq_len)
    first = max(context_len, 0)
    j[first:] = p[first - context_len :]
    return p, j


def visible_keys(
    query_len: int, seq_len: int, spec: Any, parents: np.ndarray | None = None
) -> np.ndarray:
    """bool `[query_len, seq_len]`: which key each new token of one sequence sees."""
    p, j = standing(query_len, seq_len, parents)
    p, j = p[:, None], j[None, :]
    seen = np.ones((query_len, seq_len), bool)
    if parents is not None:
        context_len = seq_len - query_len
        seen[:, max(context_len, 0) :] = False
        for i, line in enumerate(lines(query_len, parents)):
            seen[i, [context_len + n for n in line if context_len + n >= 0]] = True
    if spec.causal:
        seen &= j <= p
    if spec.sliding_window is not None:
        seen &= np.abs(p - j) < spec.sliding_window
    return seen


def chosen_keys(
    selection: np.ndarray | None, seq: int, seq_len: int, block_size: int, num_kv_heads: int
) -> np.ndarray:
    """bool `[k, num_kv_heads]`: the keys of a sequence whose blocks each KV head attends to."""
    if selection is None:
        return np.ones((seq_len, num_kv_heads), bool)
    sets = [set(row.tolist()) for row in selection[seq]]
    seen = [[j // block_size in blocks for blocks in sets] for j in range(seq_len)]
    return np.array(seen, bool).reshape(seq_len, num_kv_heads)


def wanted_keys(visible: np.ndarray, bias: np.ndarray | None, rows: slice) -> np.ndarray:
    """bool `[k]`: the keys that some query of a sequence sees in some head."""
    if bias is not None:
        shown = bias[rows, :, : visible.shape[1]] > -np.inf
        visible = visible & shown.any(1)
    return np.any(visible, axis=0, keepdims=True)[0]


def visible_slots(
    block_tables: Sequence[Sequence[int]] | np.ndarray,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    spec: Any,
    bias: np.ndarray | None = None,
    selection: np.ndarray | None = None,
    parents: np.ndarray | None = None,
    *,
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
) -> np.ndarray:
    """bool `[num_blocks, block_size, num_kv_heads]`: slots that some query of a KV head sees.

    The others may hold anything.
    """
    seen = np.zeros((num_blocks, block_size, num_kv_heads), bool)
    start = 0
    lens = zip(block_tables, query_lens, seq_lens, strict=True)
    for s, (table, query_len, seq_len) in enumerate(lens):
        rows = slice(start, start := start + int(query_len))
        family = None if parents is None else parents[rows]
        visible = visible_keys(int(query_len), int(seq_len), spec, family)
        chosen = chosen_keys(selection, s, int(seq_len), block_size, num_kv_heads)
        for j in np.flatnonzero(wanted_keys(visible, bias, rows)).tolist():
            seen[int(table[j // block_size]), j % block_size] |= chosen[j]
    return seen
