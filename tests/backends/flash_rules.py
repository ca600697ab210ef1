"""flash-attn-4's forward function as it is by its source (4.0.0b36): demands, loads, results.

A stand-in for a Hopper GPU: tensors lie anywhere, sums are float64. What its kernels do beyond
the formula is done here too: a tile loads keys that its queries do not see, and a NaN in them
survives a weight of 0; rows that belong to no sequence are not written.
"""

import itertools
import math
from collections.abc import Iterator

import torch

TILE_ROWS = 128  # tokens times the query heads of a KV head
TILES = {64: (128, 128), 128: (128, 128), 192: (112, 96), 256: (80, 64)}  # keys; behind a window


class Forward:
    """`_flash_attn_fwd`; `seen` has the page size, and the addresses of keys, values and out."""

    def __init__(self):
        self.seen = []

    def __call__(
        self, q, k, v, *, cu_seqlens_q, seqused_k, page_table, softmax_scale, causal, softcap,
        window_size_left, window_size_right, learnable_sink, return_lse, out, lse,
    ):  # fmt: skip
        check_arrays(q, k, v, cu_seqlens_q, seqused_k, page_table, learnable_sink)
        check_results(q, out, lse)
        assert return_lse == (lse is not None)
        self.seen.append((k.shape[1], k.data_ptr(), v.data_ptr(), out.data_ptr()))
        window = window_of(causal, window_size_left, window_size_right)
        tile = TILES[q.shape[2]][window != (None, None) and window != (None, 0)]
        group = q.shape[1] // k.shape[2]
        for seq, (start, stop) in enumerate(itertools.pairwise(cu_seqlens_q)):
            num_keys = int(seqused_k[seq])
            assert 0 <= start <= stop <= len(q), "rows outside of the queries would be written"
            assert 0 <= num_keys <= page_table.shape[1] * k.shape[1], "lengths lead out of a table"
            shift = num_keys - int(stop - start)
            for rows in tiles_of(int(start), int(stop), max(1, TILE_ROWS // group)):
                at = torch.arange(rows.start, rows.stop, device=q.device) - start + shift
                key, value, numbers = loaded(k, v, page_table[seq], num_keys, at, window, tile)
                seen = visible(at, numbers, num_keys, window)
                result, sums = attend(q[rows], key, value, seen, softmax_scale, softcap)
                if learnable_sink is not None:
                    result, sums = with_sink(result, sums, learnable_sink.double())
                out[rows] = result.to(out.dtype)
                if lse is not None:
                    lse[:, rows] = sums.float().T
        return out, lse, None, None, None


def check_arrays(q, k, v, starts, lens, tables, sinks):
    """What it asserts, and what else it needs not to copy a whole cache."""
    assert q.dtype is k.dtype is v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.shape[1] % k.shape[2] == 0
    assert q.shape[2] == k.shape[3] == v.shape[3]
    assert k.shape == v.shape
    assert starts.shape == (len(lens) + 1,)
    assert len(tables) == len(lens)
    for array in (starts, lens, tables):
        assert array.dtype is torch.int32
        assert array.stride(-1) == 1
    for plane in (k, v):
        assert plane.stride(3) == 1
        assert all(stride % 8 == 0 for stride in plane.stride()[:3]), "the cache would be copied"
    if sinks is not None:
        assert sinks.shape == (q.shape[1],)
        assert sinks.dtype in (torch.float32, torch.float16, torch.bfloat16)


def check_results(q, out, lse):
    assert out.shape == q.shape
    assert out.dtype is q.dtype
    assert out.stride(2) == 1
    if lse is not None:
        assert lse.shape == (q.shape[1], len(q))
        assert lse.dtype is torch.float32
        assert lse.stride(1) == 1


def window_of(causal, left, right):
    """(left, right) as it resolves them: None is unbounded."""
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return left, 0 if causal else right


def tiles_of(start: int, stop: int, size: int) -> Iterator[slice]:
    for first in range(start, stop, size):
        yield slice(first, min(first + size, stop))


def loaded(k, v, row, num_keys, at, window, tile):
    """Keys, values and their numbers for queries at `at`: whole tiles, but nothing past the end.

    Where a page is a tile long it is loaded whole. The first tile is loaded, if there is no key in
    the range too.
    """
    size, (left, right) = k.shape[1], window
    last = num_keys if right is None else min(num_keys, int(at[-1]) + right + 1)
    last = max(1, -(-last // tile)) * tile
    first = 0 if left is None else max(0, (int(at[0]) - left) // tile * tile)
    numbers = torch.arange(min(first, last - tile), last, device=k.device)
    if size != tile:
        numbers = numbers[numbers < num_keys]
    blocks = row[numbers // size].long()
    assert ((blocks >= 0) & (blocks < len(k))).all(), "a page outside of the cache is loaded"
    return k[blocks, numbers % size].double(), v[blocks, numbers % size].double(), numbers


def visible(at, numbers, num_keys, window):
    """bool `[queries, keys]`."""
    left, right = window
    apart = numbers - at[:, None]
    seen = (numbers < num_keys).expand_as(apart)
    if right is not None:
        seen = seen & (apart <= right)
    return seen if left is None else seen & (apart >= -left)


def attend(query, key, value, seen, scale, cap):
    """out `[q, heads, dim]` and the natural lse `[q, heads]`: 0 and -inf for rows without keys."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->qhk", query.double(), key) * scale
    logits = cap * torch.tanh(logits / cap) if cap else logits
    logits = logits.masked_fill(~seen[:, None], -math.inf)
    lse = logits.logsumexp(-1)
    weights = torch.exp(logits - lse.nan_to_num(neginf=0)[..., None])
    return torch.einsum("qhk,khd->qhd", weights, value), lse


def with_sink(out, lse, sinks):
    """A row without keys has its head's sink as its lse."""
    total = torch.logaddexp(lse, sinks.expand_as(lse))
    weight = torch.exp(lse - total).nan_to_num(0)
    return out * weight[..., None], total
