"""Which blocks are chosen: the best ones, the first and last ones always, each once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import InvalidInputError, Selection, make_batch, select_blocks
from pagedattn.selection import kernels
from pagedattn.selection.selection import in_order

SIZE, WIDTH = 4, 12
WAYS = {"as here": kernels.BACKENDS, "by XLA": {}}


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    """By the device's own kernel, if it has one, and by XLA's sorts."""
    monkeypatch.setattr(kernels, "BACKENDS", WAYS[request.param])
    jax.clear_caches()


def batch_with(lens):
    tables = [[0] * WIDTH] * len(lens)
    return make_batch([0] * len(lens), lens, tables, block_size=SIZE, max_query_len=1)


def best_of(scores, count, num_blocks, first, last):
    """By sorting: the first and last ones, then the others by score, the first of equal ones."""
    always = {*range(min(first, count)), *range(max(0, count - last), count)}
    rest = [c for c in range(count) if c not in always and scores[c] > -np.inf]
    rest.sort(key=lambda column: -scores[column])
    return sorted([*always, *rest[: num_blocks - len(always)]])


@pytest.mark.usefixtures("way")
@given(data=st.data())
def test_the_best_are_chosen_in_order(data):
    """Scores have few values, so that many are equal, and -inf."""
    lens = data.draw(st.lists(st.integers(0, SIZE * WIDTH), min_size=3, max_size=3))
    first, last = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    num_blocks = data.draw(st.integers(max(1, first + last), WIDTH + 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    scores = rng.integers(-2, 3, (3, 2, WIDTH)).astype(np.float32)
    scores[rng.random(scores.shape) < 0.2] = -np.inf
    scores[rng.random(scores.shape) < 0.1] = -0.0
    ends = {"first": first, "last": last}
    choose = jax.jit(select_blocks, static_argnums=2, static_argnames=("first", "last"))
    got = choose(scores, batch_with(lens), num_blocks, **ends)
    assert got.ascending
    assert got.blocks.shape == (3, 2, min(num_blocks, WIDTH))
    for s, seq_len in enumerate(lens):
        for head in range(2):
            want = best_of(scores[s, head], -(-seq_len // SIZE), num_blocks, first, last)
            row = got.blocks[s, head].tolist()
            assert row == want + [-1] * (len(row) - len(want))


@pytest.mark.usefixtures("way")
def test_few_of_many_are_chosen():
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((2, 3, 5000)).astype(np.float32)
    tables = np.zeros((2, 5000), int)
    batch = make_batch([0, 0], [4999, 31], tables, block_size=1)
    got = select_blocks(scores, batch, 40, first=2, last=3).blocks
    for s, count in enumerate((4999, 31)):
        for head in range(3):
            want = best_of(scores[s, head], count, 40, 2, 3)
            assert got[s, head, : len(want)].tolist() == want
            assert (got[s, head, len(want) :] == -1).all()


@given(rows=st.lists(st.lists(st.integers(-3, 9), min_size=7, max_size=7), min_size=2, max_size=2))
def test_a_selection_is_put_in_order_as_a_set(rows):
    lens = jnp.array([22])
    got = in_order(Selection(jnp.array([rows])), lens, SIZE, max_blocks=6)
    for row, given_row in zip(got[0].tolist(), rows, strict=True):
        want = sorted({block for block in given_row if 0 <= block < 6})
        assert row == want + [-1] * (6 - len(want))


def test_what_does_not_fit_is_refused():
    batch, scores = batch_with([9]), jnp.zeros((1, 2, WIDTH))
    with pytest.raises(InvalidInputError, match="num_blocks must be at least first"):
        select_blocks(scores, batch, 3, first=2, last=2)
    for wrong in (scores[0], scores[..., :5], scores.astype(int), jnp.zeros((2, 2, WIDTH))):
        with pytest.raises(InvalidInputError, match="scores must be floating"):
            select_blocks(wrong, batch, 3)
    for options in ({"first": -1}, {"last": 1.5}):
        with pytest.raises(InvalidInputError, match="must be an integer of at least 0"):
            select_blocks(scores, batch, 3, **options)


@pytest.mark.usefixtures("way")
def test_first_and_last_blocks_come_before_infinite_scores():
    """To give a block infinity is how a caller makes it come first, behind these."""
    scores = jnp.zeros((1, 1, WIDTH)).at[0, 0, 2:6].set(jnp.inf)
    selection = select_blocks(scores, batch_with([WIDTH * SIZE]), 4, first=1, last=1)
    assert selection.blocks.tolist() == [[[0, 2, 3, WIDTH - 1]]]
