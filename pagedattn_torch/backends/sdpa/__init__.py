"""Paged attention by PyTorch's scaled_dot_product_attention: every feature, any torch device.

Sequences of like lengths are gathered from the pages into one dense rectangle, and the query heads
of a KV head are folded into the query axis: SDPA then reads keys once a group, where enable_gqa
reads them once a head (11 times slower on CPU decode).

On a CPU no more keys are gathered at a time than its cache holds; the results for these parts are
joined by their log-sum-exps. Masks are explicit, because `is_causal` aligns the first query with
the first key, which is wrong as soon as there is a context.
"""

import collections
import functools
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from pagedattn import KVCache
from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences
from pagedattn.cache.quantise import dequantised

from ...arrays import bits
from ..bias import bias_at, zeroed
from ..gather import by_group, fold, fold_bias
from . import kernels
from .parts import Hidden, Part, Rectangle, Tile, Turn, rectangles

SUPPORTS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"}
    | {"cache_dtype", "token_scales", "value_dim", "fake_tensors", "bias", "parents"}
    | {"return_lse"}
)
# Keys and values gathered at a time: few enough to stay in the CPU's cache until SDPA reads them.
SCRATCH_BYTES = 4 << 20


class Plan(NamedTuple):
    """What the layers of a step share.

    Fields:
      rectangles: the batch.
      num_blocks, num_gathered: the most blocks that a turn has, and that one gathers.
      is_whole: whether every token is known to get a result.
    """

    rectangles: list[Rectangle]
    num_blocks: int
    num_gathered: int
    is_whole: bool


def plan(call: Call, batch: Sequences) -> Plan:
    dtype = _dtype(call.device, call.dtype)
    token_bytes = call.num_kv_heads * (call.head_dim + call.out_dim) * dtype.itemsize
    made = rectangles(call, batch, SCRATCH_BYTES // token_bytes)
    num_blocks = num_gathered = 0
    for rectangle in made:
        for turn in rectangle.turns:
            size = turn.blocks.shape[0]
            num_blocks = max(num_blocks, size)
            num_gathered = num_gathered if turn.run is not None else max(num_gathered, size)
    return Plan(made, num_blocks, num_gathered, _is_whole(call, made))


def _is_whole(call: Call, rectangles: list[Rectangle]) -> bool:
    if call.device != "cpu":
        return False
    written = torch.zeros(call.num_tokens + 1, dtype=torch.bool, device="cpu")  # one for padding
    for rectangle in rectangles:
        for number in {part.tile for turn in rectangle.turns for part in turn.parts}:
            tile = rectangle.tiles[number]
            written[tile.tokens if tile.run is None else tile.run] = True
    return bool(written[:-1].all())


def run(
    call: Call,
    query: Float[Tensor, "num_tokens num_heads head_dim"],
    cache: KVCache,
    plan: Plan,
    *,
    bias: Float[Tensor, "num_tokens heads max_keys"] | None = None,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[
    Float[Tensor, "num_tokens num_heads value_dim"], Float[Tensor, "num_tokens num_heads"] | None
]:
    results = _results(call, query, plan.is_whole, out)
    scales = (cache.key_scale, cache.value_scale) if call.token_scales else (None, None)
    planes = list(zip(cache.planes, scales, strict=False))
    rooms = _rooms(call, cache.planes, plan)
    for rectangle in plan.rectangles:
        _attend(call, rectangle, query, planes, bias, rooms, results)
    result, lse = results
    if call.device == "cpu":
        return result, lse
    return result[: call.num_tokens], None if lse is None else lse[: call.num_tokens]


BACKEND = Backend("sdpa", SUPPORTS, run, plan=plan, takes_out=True)


@functools.cache
def _dtype(device: str, dtype: str) -> torch.dtype:
    """The dtype to compute in: on a CPU float16 is several times slower than float32."""
    return torch.float32 if (device, dtype) == ("cpu", "float16") else getattr(torch, dtype)


def _results(call: Call, query, is_whole: bool, out) -> tuple[Tensor, Tensor | None]:
    """Memory for out and lse; filled, unless all is written later, as for tokens that see no key.

    On other devices than a CPU it has one row more, which is thrown away: rectangles write there
    what they compute for their padding, since to leave that out they would wait for the device.
    """
    num_rows = call.num_tokens + (call.device != "cpu")
    result, lse = out if out is not None and call.device == "cpu" else (None, None)
    if result is None:
        result = query.new_empty(num_rows, *call.out_shape[1:])
    if lse is None and call.return_lse:
        lse = query.new_empty(num_rows, call.num_heads, dtype=torch.float32)
    if not is_whole:
        result.zero_()
        lse = None if lse is None else lse.fill_(-torch.inf)
    return result, lse


def _rooms(call: Call, planes, plan: Plan) -> list[tuple[Tensor | None, Tensor | None]]:
    """Memory for the gathered blocks of each plane, in its own dtype and, if another, in `_dtype`.

    None where none is needed, as for what per-token scales are multiplied with. All rectangles use
    it, one after the other: fresh memory for each would cost page faults.
    """
    dtype, rooms = _dtype(call.device, call.dtype), []
    for plane in planes:
        shape = plane.shape[1:]
        room = plane.new_empty(plan.num_gathered, *shape) if plan.num_gathered else None
        shape, as_it_is = (plan.num_blocks, *shape), plane.dtype is dtype or call.token_scales
        rooms.append((room, None if as_it_is else plane.new_empty(shape, dtype=dtype)))
    return rooms


def _attend(call: Call, rectangle: Rectangle, query, planes, bias, rooms, results) -> None:
    """Computes one rectangle and writes its rows of out and lse."""
    queries = [_queries(call, tile, query) for tile in rectangle.tiles]
    states = collections.defaultdict(list)
    for turn in rectangle.turns:
        gathered = _gathered(call, turn, planes, rooms)
        for part in turn.parts:
            hidden = part.hidden()
            if bias is not None:
                hidden = _with_bias(call, part, hidden, rectangle.tiles[part.tile], bias)
            states[part.tile].append(_state(call, part, hidden, queries[part.tile], gathered))
    for number, of_tile in states.items():
        _write(rectangle.tiles[number], of_tile, results)


def _queries(
    call: Call, tile: Tile, query: Float[Tensor, "num_tokens num_heads head_dim"]
) -> Float[Tensor, "size kv_heads rows head_dim"]:
    """The queries of a tile, folded."""
    if tile.run is None:
        rows = query[tile.read]
    else:
        rows = _slice(query, tile.run).view(*tile.tokens.shape, *query.shape[1:])
    return fold(rows.to(_dtype(call.device, call.dtype)), call.num_kv_heads)


def _slice(rows: Tensor, run: slice) -> Tensor:
    return rows if run.stop - run.start == rows.shape[0] else rows[run]


def _gathered(call: Call, turn: Turn, planes, rooms) -> list[Tensor]:
    """Keys and values of a turn as `[size, kv_heads, keys, dim]`; of a latent cache the keys."""
    gathered = []
    for (plane, scale), (room, wide) in zip(planes, rooms, strict=True):
        pages = plane[turn.run] if turn.run is not None else _pages(turn, plane, room)
        if scale is not None:
            dtype = _dtype(call.device, call.dtype)
            pages = dequantised(pages, _pages(turn, scale, None), dtype)
        elif wide is not None:
            pages = wide[: turn.blocks.shape[0]].copy_(pages)
        pages = pages.reshape(turn.size, -1, *pages.shape[2:])
        gathered.append(pages.transpose(1, 2))
    return gathered


def _pages(
    turn: Turn, array: Shaped[Tensor, "num_blocks ..."], room: Tensor | None
) -> Shaped[Tensor, "blocks ..."]:
    """The blocks of a turn of an array of the cache, in place or in a room, or in fresh memory."""
    if turn.run is not None:
        return array[turn.run]
    held = bits(array)
    out = None if room is None else bits(room[: turn.blocks.shape[0]])
    pages = torch.index_select(held, 0, turn.blocks, out=out).view(array.dtype)
    if turn.absent is not None:
        _clear(bits(pages).flatten(0, 1), turn.absent)
    return pages


def _clear(
    rows: Shaped[Tensor, "slots ..."],
    absent: Bool[Tensor, "slots"] | Int[Tensor, "num_absent"],
) -> None:
    """Zeroes the rows that no query may look at: a NaN there would survive a weight of 0."""
    if absent.dtype is torch.bool:
        absent = absent.view(-1, *[1] * (rows.ndim - 1))
        rows.masked_fill_(absent, 0)  # does not wait for a GPU
    else:
        rows.index_fill_(0, absent, 0)  # touches only these rows


def _with_bias(call: Call, part: Part, hidden: Hidden, tile: Tile, bias) -> Hidden:
    return hidden.with_bias(fold_bias(bias_at(bias, tile.tokens, part.numbers()), call))


def _state(
    call: Call,
    part: Part,
    hidden: Hidden,
    query: Float[Tensor, "size kv_heads rows head_dim"],
    planes: list[Float[Tensor, "size kv_heads keys _"]],
) -> tuple[Float[Tensor, "size kv_heads rows value_dim"], Float[Tensor, "size kv_heads rows"]]:
    """Out and lse of a tile's queries over the keys of a part, folded."""
    if part.keys.stop - part.keys.start < planes[0].shape[2]:
        planes = [plane[:, :, part.keys] for plane in planes]
    if call.bias is not None and hidden.added is not None:
        planes = [zeroed(plane, hidden.added) for plane in planes]
    out, lse = kernels.choose(call)(call, query, planes[0], planes[-1], hidden.added)
    if hidden.blind is None:
        return out, lse
    return out.masked_fill(hidden.blind[..., None], 0), lse.masked_fill(hidden.blind, -torch.inf)


def _write(tile: Tile, states, results) -> None:
    """Joins the states of a tile's queries, and writes them to the rows of their tokens."""
    outs, lses = zip(*states, strict=True)
    out, lse = results
    _put(out, tile, outs[0] if len(outs) == 1 else _joined(outs, lses))
    if lse is not None:
        _put(lse, tile, torch.stack(lses).logsumexp(0))


def _put(result, tile: Tile, folded) -> None:
    rows = by_group(folded, tile.tokens.shape[1])
    if tile.run is not None:
        _slice(result, tile.run).view(rows.shape).copy_(rows)
        return
    result = result.view(-1, *rows.shape[2:])
    if tile.live is not None:
        result[tile.tokens[tile.live]] = rows[tile.live].to(result.dtype)
    else:
        result[tile.tokens] = rows.to(result.dtype)


def _joined(
    outs: tuple[Float[Tensor, "size kv_heads rows value_dim"], ...],
    lses: tuple[Float[Tensor, "size kv_heads rows"], ...],
) -> Float[Tensor, "size kv_heads rows value_dim"]:
    """The result for all keys, from the results for disjoint parts of them."""
    weights = torch.stack(lses).softmax(0).nan_to_num(0)  # NaN where a row sees no key
    return (torch.stack(outs) * weights[..., None]).sum(0)
