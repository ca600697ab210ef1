"""Paged attention by PyTorch's scaled_dot_product_attention: every feature, any torch device.

Sequences of like lengths are gathered from the pages into one dense rectangle, and the query heads
of a KV head are folded into the query axis: SDPA then reads keys once a group, where enable_gqa
reads them once a head (11 times slower on CPU decode).

On a CPU no more keys are gathered at a time than its cache holds; the results for these parts are
joined by their log-sum-exps. Masks are explicit, because `is_causal` aligns the first query with
the first key, which is wrong as soon as there is a context.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from pagedattn import KVCache
from pagedattn.backend import Backend
from pagedattn.batch import Sequences
from pagedattn.call import Call

from ...arrays import bits
from ...bias import bias_at, zeroed
from ...rectangles import fold, fold_bias, unfold
from . import kernels
from .parts import Hidden, Part, Rectangle, Turn, rectangles

HONOURS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"}
    | {"cache_dtype", "value_dim", "fake_tensors", "bias", "return_lse"}
)
# Keys and values gathered at a time: few enough to stay in the CPU's cache until SDPA reads them.
SCRATCH_BYTES = 4 << 20


def plan(call: Call, batch: Sequences) -> list[Rectangle]:
    token_bytes = call.num_kv_heads * (call.head_dim + call.out_dim) * _dtype(call).itemsize
    return rectangles(call, batch, SCRATCH_BYTES // token_bytes)


def run(
    call: Call,
    query: Float[Tensor, "num_tokens num_heads head_dim"],
    cache: KVCache,
    plan: list[Rectangle],
    *,
    bias: Float[Tensor, "num_tokens heads max_keys"] | None = None,
    out: tuple[Tensor, Tensor | None] | None = None,
) -> tuple[
    Float[Tensor, "num_tokens num_heads value_dim"], Float[Tensor, "num_tokens num_heads"] | None
]:
    results = _results(call, query, out)
    rooms = _rooms(call, cache, plan)
    for rectangle in plan:
        _attend(call, rectangle, query, cache, bias, rooms, results)
    result, lse = (part[: call.num_tokens] for part in results)
    return result, lse if call.return_lse else None


BACKEND = Backend("sdpa", HONOURS, run, plan=plan, takes_out=True)


def _dtype(call) -> torch.dtype:
    """The dtype to compute in: on a CPU float16 is several times slower than float32."""
    slow = call.device == "cpu" and call.dtype == "float16"
    return torch.float32 if slow else getattr(torch, call.dtype)


def _results(call: Call, query, out) -> tuple[Tensor, Tensor]:
    """Memory for out and lse, filled as for tokens that see no key.

    On other devices than a CPU it has one row more, which is thrown away: rectangles write there
    what they compute for their padding, since to leave that out they would wait for the device.
    """
    num_rows = call.num_tokens + (call.device != "cpu")
    given = out if out is not None and call.device == "cpu" else (None, None)
    shapes = (num_rows, *call.out_shape[1:]), (num_rows, call.num_heads)
    dtypes = query.dtype, torch.float32
    result, lse = (
        query.new_empty(shape, dtype=dtype) if part is None else part
        for part, shape, dtype in zip(given, shapes, dtypes, strict=True)
    )
    return result.zero_(), lse.fill_(-torch.inf)


def _rooms(call: Call, cache: KVCache, plan: list[Rectangle]) -> list[tuple[Tensor, Tensor]]:
    """Memory for the gathered blocks of each plane, in its own dtype and in `_dtype`.

    All rectangles use it, one after the other: fresh memory for each would cost page faults.
    """
    num_blocks = max((len(turn.blocks) for each in plan for turn in each.turns), default=0)
    rooms = [plane.new_empty(num_blocks, *plane.shape[1:]) for plane in cache.planes]
    dtype = _dtype(call)
    return [
        (room, room if room.dtype is dtype else torch.empty_like(room, dtype=dtype))
        for room in rooms
    ]


def _attend(call: Call, rectangle: Rectangle, query, cache: KVCache, bias, rooms, results) -> None:
    """Computes one rectangle and writes its rows of out and lse."""
    queries = [_queries(call, tile, query) for tile in rectangle.tiles]
    states = [[] for _ in queries]
    for turn in rectangle.turns:
        planes = list(_gathered(call, turn, cache, rooms))
        for part in turn.parts:
            hidden = _hidden(call, part, rectangle.tiles[part.tile], bias)
            states[part.tile].append(_state(call, part, hidden, queries[part.tile], planes))
    for tokens, tile_states in zip(rectangle.tiles, states, strict=True):
        if tile_states:
            _write(call, tokens, tile_states, results)


def _queries(
    call: Call,
    tokens: Int[Tensor, "size queries"],
    query: Float[Tensor, "num_tokens num_heads head_dim"],
) -> Float[Tensor, "size kv_heads {call.group}*queries head_dim"]:
    """The queries of a tile, folded."""
    rows = query[tokens.clamp(max=call.num_tokens - 1)]
    return fold(rows.to(_dtype(call)), call.num_kv_heads)


def _gathered(call, turn: Turn, cache, rooms) -> Iterator[Tensor]:
    """Keys and values of a turn as `[size, kv_heads, keys, dim]`; of a latent cache the keys."""
    for plane, (room, wide) in zip(cache.planes, rooms, strict=True):
        pages = room[: len(turn.blocks)]
        torch.index_select(bits(plane), 0, turn.blocks, out=bits(pages))
        if turn.absent is not None:
            _clear(bits(pages).flatten(0, 1), turn.absent)
        if wide is not room:
            pages = wide[: len(turn.blocks)].copy_(pages)
        yield pages.view(turn.size, -1, *plane.shape[2:]).transpose(1, 2)


def _clear(
    rows: Shaped[Tensor, "slots kv_heads head_dim"],
    absent: Bool[Tensor, "slots"] | Int[Tensor, "num_absent"],
) -> None:
    """Zeroes the rows that no query may look at: a NaN there would survive a weight of 0."""
    if absent.dtype is torch.bool:
        rows.masked_fill_(absent[:, None, None], 0)  # does not wait for a GPU
    else:
        rows.index_fill_(0, absent, 0)  # touches only these rows


def _hidden(call: Call, part: Part, tokens: Int[Tensor, "size queries"], bias) -> Hidden:
    hidden = part.hidden()
    if bias is None:
        return hidden
    return hidden.with_bias(fold_bias(bias_at(bias, tokens, part.numbers()), call))


def _state(
    call: Call,
    part: Part,
    hidden: Hidden,
    query: Float[Tensor, "size kv_heads rows head_dim"],
    planes: list[Float[Tensor, "size kv_heads keys _"]],
) -> tuple[Float[Tensor, "size kv_heads rows value_dim"], Float[Tensor, "size kv_heads rows"]]:
    """Out and lse of a tile's queries over the keys of a part, folded."""
    planes = [plane[:, :, part.keys] for plane in planes]
    if call.bias is not None and hidden.added is not None:
        planes = [zeroed(plane, hidden.added) for plane in planes]
    out, lse = kernels.choose(call)(call, query, planes[0], planes[-1], hidden.added)
    if hidden.blind is None:
        return out, lse
    return out.masked_fill(hidden.blind[..., None], 0), lse.masked_fill(hidden.blind, -torch.inf)


def _write(call: Call, tokens: Int[Tensor, "size queries"], states, results) -> None:
    """Joins the states of a tile's queries, and writes them to the rows of their tokens."""
    outs, lses = zip(*states, strict=True)
    out, lse = results
    _put(call, out, tokens, _joined(outs, lses))
    if call.return_lse:
        _put(call, lse, tokens, torch.stack(lses).logsumexp(0))


def _put(call: Call, result, tokens: Int[Tensor, "size queries"], folded) -> None:
    rows = unfold(folded, tokens.shape[1])
    if call.device == "cpu" and not (live := tokens < call.num_tokens).all():
        tokens, rows = tokens[live], rows[live]
    result[tokens] = rows.to(result.dtype)


def _joined(
    outs: tuple[Float[Tensor, "size kv_heads rows value_dim"], ...],
    lses: tuple[Float[Tensor, "size kv_heads rows"], ...],
) -> Float[Tensor, "size kv_heads rows value_dim"]:
    """The result for all keys, from the results for disjoint parts of them."""
    if len(outs) == 1:
        return outs[0]
    weights = torch.stack(lses).softmax(0).nan_to_num(0)  # NaN where a row sees no key
    return (torch.stack(outs) * weights[..., None]).sum(0)
