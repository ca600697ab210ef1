"""The oracle against hand-computed cases and a dense formula; its mutants against the tolerance."""

import ml_dtypes
import numpy as np
import pytest
from cases import SIGNED, SPECS, mixed, replace_spec

from pagedattn import AttentionSpec
from pagedattn.testing import (
    Problem,
    assert_attention_close,
    expect,
    oracle,
    random_problem,
    reference_attention,
    reference_write,
    tolerances,
    visibility,
)
from pagedattn.testing.features import ARRAYS

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
LN3 = np.log(3.0)

# One query (1.0) at position 2 over keys with logits k = 0, ln 3, 0 and values 1, 2, 4; scale 1.
HAND = {
    "plain": ({}, (1 + 3 * 2 + 4) / 5, np.log(5)),
    "window 1": ({"sliding_window": 1}, 4.0, 0.0),
    "window 2": ({"sliding_window": 2}, (3 * 2 + 4) / 4, np.log(4)),
    "window 9": ({"sliding_window": 9}, 11 / 5, np.log(5)),
    "scale 2": ({"scale": 2.0}, (1 + 9 * 2 + 4) / 11, np.log(11)),
    "alibi ln 3": ({"alibi_slopes": (LN3,)}, (1 / 9 + 2 + 4) / (1 / 9 + 2), np.log(1 / 9 + 2)),
    "alibi -ln 3": ({"alibi_slopes": (-LN3,)}, (9 + 9 * 2 + 4) / 19, np.log(19)),
    "cap": (
        {"logits_soft_cap": LN3, "scale": 1e9},
        (1 + 3 * 2 + 4) / 5,  # the cap's bound, ln 3, for the huge logit
        np.log(5),
    ),
    "cap before alibi": (
        {"logits_soft_cap": LN3, "scale": 1e9, "alibi_slopes": (LN3,)},
        (1 / 9 + 2 + 4) / (1 / 9 + 2),
        np.log(1 / 9 + 2),
    ),
}


def hand_problem(fields: dict) -> Problem:
    key = np.array([0, LN3, 0, np.nan]).reshape(2, 2, 1, 1)
    value = np.array([1.0, 2, 4, np.nan]).reshape(2, 2, 1, 1)
    spec = AttentionSpec(**{"scale": 1.0, **fields})
    # stored in blocks [1, 0], so that the walk has to look the table up
    return Problem(np.ones((1, 1, 1)), key[::-1], value[::-1], [[1, 0]], [1], [3], spec)


@pytest.mark.parametrize("name", HAND)
def test_hand_computed(name):
    fields, out, lse = HAND[name]
    got_out, got_lse = tolerances.reference(hand_problem(fields))
    np.testing.assert_allclose(got_out.item(), out, rtol=1e-12)
    np.testing.assert_allclose(got_lse.item(), lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("sink", "out", "lse"),
    [(LN3, 11 / 8, np.log(8)), (-np.inf, 11 / 5, np.log(5)), (800.0, 0, 800)],
)
def test_sinks_by_hand(sink, out, lse):
    problem = hand_problem({}).replace(sinks=np.array([sink]))
    got_out, got_lse = tolerances.reference(problem)
    np.testing.assert_allclose(got_out.item(), out, rtol=1e-12, atol=1e-300)
    np.testing.assert_allclose(got_lse.item(), lse, rtol=1e-12)


def test_default_scale_is_the_inverse_root_of_head_dim():
    cache = np.zeros((1, 2, 1, 4))
    cache[0, 1] = 1.0
    _, lse = reference_attention(
        np.ones((1, 1, 4)), cache, cache, [[0]], [2], [0, 1], AttentionSpec()
    )
    np.testing.assert_allclose(lse.item(), np.log(1 + np.exp(4 / 2.0)), rtol=1e-12)


VISIBLE = [
    # query_len, seq_len, spec fields, what each new token sees
    (2, 4, {}, ["1110", "1111"]),
    (2, 4, {"sliding_window": 1}, ["0010", "0001"]),
    (2, 4, {"sliding_window": 2}, ["0110", "0011"]),
    (2, 4, {"causal": False}, ["1111", "1111"]),
    (2, 4, {"causal": False, "sliding_window": 2}, ["0111", "0011"]),
    (3, 1, {}, ["0", "0", "1"]),  # more queries than keys: context_len is -2
    (3, 1, {"causal": False}, ["1", "1", "1"]),
    (3, 1, {"causal": False, "sliding_window": 2}, ["0", "1", "1"]),
    (0, 3, {}, []),
    (2, 0, {}, ["", ""]),
]


@pytest.mark.parametrize(("query_len", "seq_len", "fields", "want"), VISIBLE)
def test_visible_keys(query_len, seq_len, fields, want):
    seen = visibility.visible_keys(query_len, seq_len, AttentionSpec(**fields))
    assert ["".join(str(int(x)) for x in row) for row in seen] == want


def dense(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The same attention without a cache: gather, repeat the KV heads, mask, softmax."""
    spec, group = problem.spec, problem.query.shape[1] // problem.key_cache.shape[2]
    outs, lses, start = [], [], 0
    for table, n, length in zip(
        problem.block_tables, problem.query_lens, problem.seq_lens, strict=True
    ):
        table = np.asarray(table)[: -(-length // problem.block_size)].astype(int)
        pools = problem.key_cache, problem.value_cache
        flat = [pool[table].astype(float).reshape(-1, *pool.shape[2:])[:length] for pool in pools]
        k, v = (np.repeat(x, group, axis=1) for x in flat)
        gap = (np.arange(length - n, length)[:, None] - np.arange(length))[None]
        score = np.einsum("qhd,khd->hqk", problem.query[start : start + n].astype(float), k)
        score = score * (spec.scale or problem.query.shape[-1] ** -0.5)
        cap = spec.logits_soft_cap or 1e18
        score = cap * np.tanh(score / cap)
        slopes = spec.alibi_slopes or (0,) * problem.query.shape[1]
        score = score - np.array(slopes)[:, None, None] * abs(gap)
        hidden = (gap < 0) & spec.causal | (abs(gap) >= (spec.sliding_window or 10**9))
        weight = np.exp(np.where(hidden, -np.inf, score))
        outs.append(np.einsum("hqk,khd->qhd", weight / weight.sum(-1, keepdims=True), v))
        lses.append(np.log(weight.sum(-1)).T)
        start += n
    return np.concatenate(outs), np.concatenate(lses)


@pytest.mark.parametrize("name", SPECS)
def test_agrees_with_a_dense_softmax(name):
    problem = random_problem([5, 6, 1, 0], [5, 15, 22, 7], SPECS[name], poison=None)
    out, lse = dense(problem)
    got_out, got_lse = tolerances.reference(problem)
    np.testing.assert_allclose(got_out, out, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(got_lse, lse, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SPECS)
def test_reads_only_what_is_visible(name):
    clean = mixed(SPECS[name], poison=None)
    for poison in (np.nan, np.inf):
        want, got = tolerances.reference(clean), tolerances.reference(clean.poisoned(poison))
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])


def test_poison_covers_all_that_no_query_sees():
    problem = random_problem([1], [7], AttentionSpec(sliding_window=2), block_size=4)
    seen = np.isfinite(problem.key_cache).all((2, 3))
    assert seen.sum() == 2  # positions 5 and 6
    assert seen[problem.block_tables[0][1]].tolist() == [False, True, True, False]


def test_padding_rows_and_rows_without_keys_are_empty():
    problem = random_problem([3, 0, 2], [1, 0, 2], AttentionSpec(), pad_tokens=8)
    out, lse = tolerances.reference(problem)
    empty = [0, 1, 5, 6, 7]
    np.testing.assert_array_equal(out[empty], 0)
    np.testing.assert_array_equal(lse[empty], -np.inf)
    assert np.isfinite(lse[[2, 3, 4]]).all()


def test_reference_write():
    cache = np.zeros((2, 2, 1, 1))
    new = np.array([1.0, 2, 3, 4]).reshape(4, 1, 1)
    key, value = reference_write(cache, cache, new, 10 * new, [3, -1, 0, 4])
    assert key.ravel().tolist() == [3, 0, 0, 1]
    assert value.ravel().tolist() == [30, 0, 0, 10]
    assert not cache.any()


def dropped_scale(problem):
    return tolerances.reference(replace_spec(problem, scale=1.0))


def narrow_window(problem):
    return tolerances.reference(
        replace_spec(problem, sliding_window=problem.spec.sliding_window - 1)
    )


def wide_window(problem):
    return tolerances.reference(
        replace_spec(problem, sliding_window=problem.spec.sliding_window + 1)
    )


def swapped_block(problem):
    tables = [list(row) for row in problem.block_tables]
    tables[1][-1], tables[1][-2] = tables[1][-2], tables[1][-1]
    return tolerances.reference(problem.replace(block_tables=tables))


def neighbours_table(problem):
    tables = [list(row) for row in problem.block_tables]
    tables[1][-1] = tables[2][0]
    return tolerances.reference(problem.replace(block_tables=tables))


def reversed_slopes(problem):
    slopes = problem.spec.alibi_slopes[::-1]
    return tolerances.reference(replace_spec(problem, alibi_slopes=slopes))


def without(field, value=None):
    def mutant(problem):
        return tolerances.reference(replace_spec(problem, **{field: value}))

    mutant.__name__ = f"without_{field}"
    return mutant


def kv_head_by_modulo(problem):
    """KV head `h % num_kv_heads` in the place of `h // group`."""
    order = [0, 2, 1, 3]
    shuffled = problem.replace(query=problem.query[:, order])
    slopes = np.array(problem.spec.alibi_slopes)[order]
    shuffled = shuffled.replace(sinks=problem.sinks[order], bias=problem.bias[:, order])
    out, lse = tolerances.reference(replace_spec(shuffled, alibi_slopes=tuple(slopes)))
    return out[:, order], lse[:, order]


def without_sinks(problem):
    return tolerances.reference(problem.replace(sinks=None))


def without_selection(problem):
    return tolerances.reference(problem.replace(selection=None))


def the_other_heads_selection(problem):
    return tolerances.reference(problem.replace(selection=problem.selection[:, ::-1]))


def without_bias(problem):
    return tolerances.reference(problem.replace(bias=None))


def cap_after_alibi(problem, monkeypatch):
    def logits(head, spec):
        score = spec.scale * (head.query @ head.keys.T)
        score = score - spec.alibi_slopes[head.index] * head.distance
        score = spec.logits_soft_cap * np.tanh(score / spec.logits_soft_cap) + head.bias
        return np.where(head.visible, score, -np.inf)

    monkeypatch.setattr(oracle, "logits", logits)
    return tolerances.reference(problem)


def top_left_causal(problem, monkeypatch):
    def visible_keys(query_len, seq_len, spec, _parents):
        p, j = np.arange(query_len)[:, None], np.arange(seq_len)[None]
        return (j <= p) & (p - j < spec.sliding_window)

    monkeypatch.setattr(oracle, "visible_keys", visible_keys)
    return tolerances.reference(problem)


def alibi_from_the_chunk(problem, monkeypatch):
    """Distances that forget the context: position i in the place of context_len + i."""
    true_heads = oracle.heads

    def heads(*args):
        for head in true_heads(*args):
            q, k = head.visible.shape
            yield head._replace(distance=abs(np.arange(q)[:, None] - np.arange(k)))

    monkeypatch.setattr(oracle, "heads", heads)
    return tolerances.reference(problem)


MUTANTS = [
    dropped_scale,
    narrow_window,
    wide_window,
    swapped_block,
    neighbours_table,
    reversed_slopes,
    without("causal", False),
    without("sliding_window"),
    without("logits_soft_cap"),
    without("alibi_slopes"),
    kv_head_by_modulo,
    without_sinks,
    without_bias,
    without_selection,
    the_other_heads_selection,
]
PATCHED_MUTANTS = [cap_after_alibi, top_left_causal, alibi_from_the_chunk]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mutant", [*MUTANTS, *PATCHED_MUTANTS], ids=lambda f: f.__name__)
def test_mutants_are_caught(mutant, dtype, monkeypatch):
    # short enough a window that one key weighs more than bfloat16's rounding
    problem = mixed(SPECS["all"], dtype=dtype, poison=None, arrays=ARRAYS, seed=1)
    want = expect(problem)
    args = (monkeypatch,) if mutant in PATCHED_MUTANTS else ()
    out, lse = mutant(problem, *args)
    with pytest.raises(AssertionError, match=r"mutant: out (is off in|must be)"):
        assert_attention_close(out.astype(dtype), None, want, name="mutant")
    with pytest.raises(AssertionError, match=r"mutant: lse (is off in|must be)"):
        assert_attention_close(want.out, lse, want, name="mutant")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_rounding_and_the_plain_formula_pass(name, dtype):
    problem = mixed(SPECS[name], dtype=dtype)
    want = expect(problem)
    assert_attention_close(want.out.astype(dtype), want.lse.astype(np.float32), want)
    assert_attention_close(*tolerances.plain_attention(problem), want)


@pytest.mark.parametrize("name", SPECS)
def test_low_precision_does_not_pass_for_float32(name):
    problem = mixed(SPECS[name])
    low = problem.replace(
        **{
            field: getattr(problem, field).astype(np.float16)
            for field in ("query", "key_cache", "value_cache")
        }
    )
    with pytest.raises(AssertionError, match="is off in"):
        assert_attention_close(*tolerances.plain_attention(low), problem)


SLIPS = [
    (0, np.nan, "out is off"),  # NaN in a valid row
    (-1, np.nan, "must be 0.0 in rows that see no key; token 19"),
    (-1, 1e-30, "must be 0.0 in rows that see no key; token 19"),
]


@pytest.mark.parametrize(("row", "value", "message"), SLIPS)
def test_one_wrong_row_is_named(row, value, message):
    want = expect(mixed())
    out = want.out.copy()
    out[row, 2] = value
    with pytest.raises(AssertionError, match=message):
        assert_attention_close(out, want.lse, want)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1e30])
def test_lse_of_an_empty_row_is_minus_infinity(value):
    want = expect(mixed())
    lse = want.lse.copy()
    lse[-1, 0] = value
    with pytest.raises(AssertionError, match="lse must be -inf"):
        assert_attention_close(want.out, lse, want)


def test_shapes_must_match():
    want = expect(mixed())
    with pytest.raises(AssertionError, match="has shape"):
        assert_attention_close(want.out[:-1], None, want)


def test_slopes_are_those_of_query_heads():
    assert len(SIGNED) == mixed().query.shape[1]
