"""The same tokens in other batches: cut, dealt to calls, padded, in blocks of other sizes."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn._arrays.namespace import cdiv
from pagedattn.testing import Problem, random_problem
from pagedattn.testing.features import OPTIONS, arrays_of, kinds_of, spec_of
from pagedattn.testing.random_problems import random_tables
from pagedattn.testing.strategies import dtypes, poisons, seeds

HEADS = ((1, 1), (3, 1), (4, 1), (4, 2), (6, 2))  # groups of 1, 3, 4, 2 and 3
HEAD_DIMS = (7, 16, 40, 64)
BLOCK_SIZES = (1, 5, 16, 64, 128)
# Beside those of OPTIONS, whose windows are narrow: by windows that chunks of keys begin within.
WIDE = {
    "wide sliding_window": AttentionSpec(sliding_window=300),
    "causal=False, wide sliding_window": AttentionSpec(sliding_window=200, causal=False),
}


class Piece(NamedTuple):
    """The tokens `[first, stop)` of a sequence's new ones, brought as a sequence of a batch."""

    seq: int
    first: int
    stop: int


class Layout(NamedTuple):
    """How a batch lies in memory, and what is in it beside its pieces."""

    block_size: int
    more_blocks: int  # of the pool
    more_columns: int  # of the tables
    pad_tokens: int
    pad_seqs: int
    longer: int  # how much the bound on query lengths is above the longest
    poison: float
    seed: int


class Call(NamedTuple):
    """One call on some pieces of a problem."""

    pieces: list[Piece]
    layout: Layout
    jit: bool


def rearranged(problem: Problem, pieces: list[Piece], layout: Layout) -> Problem:
    """The pieces of a problem's sequences as a batch; the rest is poisoned."""
    rng = np.random.default_rng(layout.seed)
    query_lens = [piece.stop - piece.first for piece in pieces]
    seq_lens = [_num_keys(problem, piece) for piece in pieces]
    blocks = [cdiv(n, layout.block_size) for n in seq_lens]
    tables = random_tables(rng, blocks, sum(blocks) + layout.more_blocks)
    width = max(blocks) + layout.more_columns
    empty = [0] * layout.pad_seqs
    changed = problem.replace(
        query=_padded(_rows(problem, problem.query, pieces), layout.pad_tokens),
        block_tables=[row + [-1] * (width - len(row)) for row in [*tables, *([] for _ in empty)]],
        query_lens=query_lens + empty,
        seq_lens=seq_lens + empty,
        max_query_len=max(query_lens) + layout.longer,
        **_planes(problem, pieces, seq_lens, tables, layout),
    )
    if problem.bias is not None:
        rows = _padded(_rows(problem, problem.bias, pieces), layout.pad_tokens)
        bias = np.zeros((*rows.shape[:2], width * layout.block_size), rows.dtype)
        common = min(bias.shape[2], rows.shape[2])
        bias[..., :common] = rows[..., :common]
        changed = changed.replace(bias=bias)
    return changed.poisoned(layout.poison)


def _num_keys(problem, piece) -> int:
    """Without causality all tokens see the same keys; with it, those up to their own."""
    behind = int(problem.query_lens[piece.seq]) - piece.stop
    return int(problem.seq_lens[piece.seq]) - (behind if problem.spec.causal else 0)


def rows_of(problem: Problem, piece: Piece) -> slice:
    """The rows of a piece in the problem that it is taken from."""
    start = int(problem.query_start_loc[piece.seq])
    return slice(start + piece.first, start + piece.stop)


def _rows(problem, array, pieces):
    return np.concatenate([array[rows_of(problem, piece)] for piece in pieces])


def _padded(rows, count):
    return np.pad(rows, [(0, count), *[(0, 0)] * (rows.ndim - 1)])


def _planes(problem, pieces, seq_lens, tables, layout):
    num_blocks = sum(map(len, tables)) + layout.more_blocks
    changed = {}
    for name, plane in problem.by_slot.items():
        changed[name] = np.zeros((num_blocks, layout.block_size, *plane.shape[2:]), plane.dtype)
        for piece, n, table in zip(pieces, seq_lens, tables, strict=True):
            held = plane[_places(problem.block_tables[piece.seq], n, problem.block_size)]
            changed[name][_places(table, n, layout.block_size)] = held
    return changed


def _places(table, count, block_size):
    """The blocks of the first keys of a sequence, and their places within these."""
    positions = np.arange(count)
    return np.asarray(table, int)[positions // block_size], positions % block_size


@st.composite
def prompts(draw: st.DrawFn, names: Sequence[str]) -> Problem:
    """A few sequences of up to 700 keys in one batch, with options of these names in `OPTIONS`."""
    num_heads, num_kv_heads = draw(st.sampled_from(HEADS))
    head_dim = draw(st.sampled_from(HEAD_DIMS))
    name = draw(st.sampled_from([*names, *WIDE]))
    options = name if name in OPTIONS else "plain"
    spec = WIDE.get(name) or spec_of(name, num_heads)
    lens = [draw(_lens(spec.causal)) for _ in range(draw(st.integers(1, 3)))]
    query_lens, seq_lens = zip(*lens, strict=True)
    cache = kinds_of(options)
    head_dim += head_dim % 2 if cache.get("cache_dtype") == "int4" else 0
    if "value_dim" in cache:
        cache["value_dim"] = min(cache["value_dim"], head_dim // 2)
    return random_problem(
        query_lens,
        seq_lens,
        spec,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        dtype=draw(dtypes()),
        arrays=arrays_of(options),
        seed=draw(seeds()),
        **cache,
    )


@st.composite
def _lens(draw, causal: bool) -> tuple[int, int]:
    """`(query_len, seq_len)`, often at the edge of a chunk of keys."""
    edges = st.sampled_from((16, 64, 128, 255, 256, 257, 512, 513))
    num_keys = draw(st.one_of(st.integers(1, 700), st.integers(1, 60), edges))
    most = min(num_keys, 90) if causal else 90
    return draw(
        st.one_of(st.just(1), st.integers(1, min(most, 12)), st.integers(1, most))
    ), num_keys


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    few = st.integers(0, 3)
    return Layout(
        block_size=draw(st.sampled_from(BLOCK_SIZES)),
        more_blocks=draw(few),
        more_columns=draw(st.sampled_from((0, 0, 1, 40))),
        pad_tokens=draw(st.sampled_from((0, 0, 1, 7, 70))),
        pad_seqs=draw(few),
        longer=draw(st.sampled_from((0, 0, 1, 100))),
        poison=draw(poisons()),
        seed=draw(seeds()),
    )


@st.composite
def calls(draw: st.DrawFn, problem: Problem) -> list[Call]:
    """Calls that between them bring the tokens of some sequences of a problem, cut anywhere.

    The last ones of a sequence are often decoded one by one. Where positions matter without
    causality, only the last tokens can be brought without the others.
    """
    spec = problem.spec
    keeps_last = not spec.causal and bool(spec.sliding_window or spec.alibi_slopes)
    pieces = []
    for seq, query_len in enumerate(problem.query_lens):
        cuts = draw(st.sets(st.integers(1, max(1, query_len - 1)), max_size=3))
        cuts |= {query_len - i for i in range(draw(st.sampled_from((0, 0, 1, 3))))}
        cuts = sorted({0, query_len} | {cut for cut in cuts if 0 < cut < query_len})
        spans = itertools.pairwise(cuts)
        pieces += [Piece(seq, a, query_len if keeps_last else b) for a, b in spans]
    pieces = draw(st.permutations(pieces))
    dealt = [draw(st.integers(0, 1)) for _ in pieces]
    hands = [[p for p, hand in zip(pieces, dealt, strict=True) if hand == h] for h in (0, 1)]
    return [Call(hand, draw(layouts()), draw(st.booleans())) for hand in hands if hand]


def bits(array: np.ndarray) -> np.ndarray:
    """The numbers as integers: 0 and -0 differ, NaN is itself."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.itemsize}")


def differing(problem: Problem, calls: list[Call], attend) -> list[str]:
    """Which pieces have other bits than the same tokens of the problem; `attend(problem, jit)`."""
    want, wrong = attend(problem, False), []
    for call in calls:
        got, start = attend(rearranged(problem, call.pieces, call.layout), call.jit), 0
        for piece in call.pieces:
            stop = start + piece.stop - piece.first
            for name, ours, whole in zip(("out", "lse"), got, want, strict=True):
                ours, whole = ours[start:stop], whole[rows_of(problem, piece)]
                if not np.array_equal(bits(ours), bits(whole)):
                    gap = np.nanmax(np.abs(ours.astype(float) - whole.astype(float)))
                    wrong.append(f"{name} of {piece} differs by up to {gap}")
            start = stop
    return wrong
