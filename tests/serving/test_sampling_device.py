"""Choosing tokens on the device: exact masks, the right distribution, the same in every batch."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY, Sampling
from pagedattn_serving.decoding.sampling_device import (
    ban,
    likeliest_rows,
    logprobs_rows,
    narrow_rows,
    pick_rows,
)
from pagedattn_serving.engine.engine import Engine
from test_serving import logits_after
from tiny import QUICK, ROOMY, TINY, serve, tiny_params, tiny_requests

from pagedattn import InvalidInputError

pytestmark = pytest.mark.usefixtures("exact_products")
VOCAB, ROWS = 12, 3
TOKENS = st.integers(0, TINY.vocab_size - 1)
SHARES = st.floats(0.01, 1) | st.floats(0, 1e-30, exclude_min=True)  # some no float32 can hold


def kept_by_the_book(logits, temperature, top_k, top_p):
    """Which tokens may be drawn, by sorting and adding one by one."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    order = [token for token in order if logits[token] >= logits[order[top_k - 1]]]
    weights = np.exp((logits[order] - logits.max()).astype(np.float64) / temperature)
    kept, total = [], 0.0
    for token, share in zip(order, weights / weights.sum(), strict=True):
        if total >= top_p and top_p < 1:
            break
        kept.append(token)
        total += share
    return logits >= logits[kept[-1]]


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10_000),
    asked=st.lists(
        st.tuples(st.floats(0.2, 3), st.integers(1, VOCAB), SHARES),
        min_size=ROWS,
        max_size=ROWS,
    ),
    levels=st.sampled_from([2, 4, 5, 10_000]),  # few: many tokens are equally likely
)
def test_what_may_be_drawn_is_exact(seed, asked, levels):
    rng = np.random.default_rng(seed)
    logits = rng.integers(levels, size=(ROWS, VOCAB)) * (8 / levels) - 4
    logits = np.where(logits == 0, rng.choice([0.0, -0.0], logits.shape), logits)
    logits = logits.astype(np.float32)
    temperatures, top_ks, top_ps = (np.array(column) for column in zip(*asked, strict=True))
    # A sum that comes to top_p but for rounding may fall on either side.
    edges = [
        kept_by_the_book(row, *one[:2], max(one[2] + d, 1e-9))
        for row, one in zip(logits, asked, strict=True)
        for d in (-1e-5, 1e-5)
    ]
    found = narrow_rows(
        logits, temperatures.astype(np.float32), top_ks.astype(np.int32), top_ps.astype(np.float32)
    )
    for row, (narrow, logit) in enumerate(zip(np.asarray(found), logits, strict=True)):
        kept = np.isfinite(narrow)
        fewest, most = edges[2 * row : 2 * row + 2]
        assert (fewest <= kept).all()
        assert (kept <= most).all()
        assert (narrow[kept] == logit[kept]).all()


def test_all_stay_unless_told_otherwise():
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32) * 30
    all_of = np.full(ROWS, VOCAB, np.int32)
    ones = np.ones(ROWS, np.float32)
    np.testing.assert_array_equal(narrow_rows(logits, ones, all_of, ones), logits)


def test_draws_follow_the_softmax():
    logits = jnp.array([2.0, 1.0, 0.0, -1.0, -jnp.inf])
    count, temperature = 4000, 0.7
    many = jnp.broadcast_to(logits, (count, 5))
    zeros, warmth = jnp.zeros(count, jnp.int32), jnp.full(count, temperature)
    tokens = pick_rows(many, zeros + 3, zeros, jnp.arange(count, dtype=jnp.int32), warmth)
    shares = np.bincount(tokens, minlength=5) / count
    expected = np.asarray(jax.nn.softmax(logits / temperature))
    assert np.abs(shares - expected).max() < 4 * np.sqrt(0.25 / count)
    assert shares[4] == 0


def test_log_probabilities_are_those_of_the_softmax():
    logits = np.random.default_rng(1).normal(size=(ROWS, VOCAB)).astype(np.float32)
    chosen = np.array([3, 0, 11], np.int32)
    of_chosen, tokens, top = likeliest_rows(logprobs_rows(logits), chosen, 4)
    expected = np.asarray(jax.nn.log_softmax(logits))
    np.testing.assert_allclose(of_chosen, expected[range(ROWS), chosen], rtol=1e-6)
    np.testing.assert_array_equal(tokens, np.argsort(-expected)[:, :4])
    np.testing.assert_allclose(top, -np.sort(-expected)[:, :4], rtol=1e-6)


MIXED = [
    GREEDY,
    Sampling(8.0, seed=4),
    Sampling(8.0, seed=4, top_k=3),
    Sampling(9.0, 2, seed=5, top_p=0.6),
    Sampling(6.0, seed=6, top_k=5, top_p=0.8, logprobs=2),
    Sampling(logprobs=0),
]


def mixed_requests():
    requests = tiny_requests((5, 9, 9, 12, 3, 7))
    requests = [replace(r, max_new_tokens=8) for r in requests]
    requests[2] = replace(requests[2], prompt=requests[1].prompt)
    return [replace(r, decoding=d) for r, d in zip(requests, MIXED, strict=True)]


def test_a_text_does_not_depend_on_its_batch():
    together = Engine(tiny_params(), TINY, replace(ROOMY, max_seqs=8), QUICK)
    streamed = list(together.stream(mixed_requests()))
    alone = Engine(tiny_params(), TINY, replace(ROOMY, max_seqs=8), QUICK)
    for request in mixed_requests():
        tokens = list(alone.stream([request]))
        assert [(t.sample, t.token, t.reason) for t in tokens] == [
            (t.sample, t.token, t.reason) for t in streamed if t.request == request.id
        ]
    assert together.completions == alone.completions
    assert together.completions[1] != together.completions[2]  # top_k changes something


def test_served_draws_are_by_the_book():
    """Every drawn token is among those that the dense model's logits let through."""
    engine = Engine(tiny_params(), TINY, replace(ROOMY, max_seqs=8), QUICK)
    serve(engine, mixed_requests())
    for request in mixed_requests()[2:5]:
        how, left_out = request.decoding, 0
        for completion in engine.completions[request.id]:
            tokens = [*request.prompt, *completion]
            for index, logits in enumerate(logits_after(tokens)[len(request.prompt) - 1 : -1]):
                top_k = how.top_k or TINY.vocab_size
                kept = kept_by_the_book(logits, how.temperature, top_k, how.top_p)
                assert kept[completion[index]]
                left_out += (~kept).sum()
        assert left_out


def test_log_probabilities_are_the_dense_models():
    requests = [
        Request(0, (3, 1, 4, 1, 5), 6, Sampling(logprobs=3)),
        Request(1, (9, 2, 6), 6, Sampling(1.0, 2, seed=1, top_k=4, logprobs=5)),
        Request(2, (5, 3, 5), 6, Sampling(1.0, logprobs=0)),
        Request(3, (8, 9, 7), 6, GREEDY),
    ]
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    streamed = list(engine.stream(requests))
    for request in requests:
        for sample, completion in enumerate(engine.completions[request.id]):
            mine = [t for t in streamed if (t.request, t.sample) == (request.id, sample)]
            tokens = [*request.prompt, *completion]
            logits = logits_after(tokens)[len(request.prompt) - 1 : -1]
            for token, logprobs in zip(mine, np.asarray(jax.nn.log_softmax(logits)), strict=True):
                count = request.decoding.logprobs
                if count is None:
                    assert token.logprob is None
                    assert token.top_logprobs == ()
                    continue
                assert token.logprob == pytest.approx(logprobs[token.token], abs=1e-3)
                best = np.argsort(-logprobs)[:count].tolist()
                assert [top for top, _ in token.top_logprobs] == best
                expected = pytest.approx(logprobs[best].tolist(), abs=1e-3)
                assert [logprob for _, logprob in token.top_logprobs] == expected


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"num_samples": 0},
        {"seed": 1 << 31},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"logprobs": 21},
    ],
)
def test_settings_out_of_range_are_refused(wrong):
    with pytest.raises(InvalidInputError, match=next(iter(wrong))):
        Sampling(**wrong)


@settings(max_examples=15)
@given(
    eos=st.lists(TOKENS, max_size=2),
    stops=st.lists(TOKENS, max_size=12),
    ignore_eos=st.booleans(),
    min_tokens=st.integers(0, 8),
    temperature=st.sampled_from([0.0, 1.0]),
)
def test_a_completion_ends_at_its_own_stop_tokens_and_not_too_early(
    eos, stops, ignore_eos, min_tokens, temperature
):
    how = {"ignore_eos": ignore_eos, "stop_tokens": tuple(stops), "min_tokens": min_tokens}
    asked = Sampling(temperature, 2, seed=3, **how)
    model = replace(TINY, eos_token_id=tuple(eos))
    engine = Engine(tiny_params(), model, ROOMY, QUICK)
    crowd = [Request(1, (4, 5), 8, GREEDY), Request(2, (6,), 8, asked)]
    serve(engine, [Request(0, (7, 8, 9), 8, asked), *crowd])
    ends = {*stops} | (set() if ignore_eos else {*eos})
    for request in (0, 2):
        for completion in engine.completions[request]:
            assert not ends & {*completion[:min_tokens]}
            assert not ends & {*completion[min_tokens:-1]}
            assert len(completion) == 8 or (completion[-1] in ends and len(completion) > min_tokens)
    alone = Engine(tiny_params(), model, ROOMY, QUICK)
    serve(alone, [Request(2, (6,), 8, asked)])
    assert alone.completions[2] == engine.completions[2]


def test_a_ban_hides_no_nan_and_what_has_no_other_token_goes_on():
    logits = jnp.array([[1.0, jnp.nan], [2.0, 1.0]])
    assert jnp.isnan(ban(logits, np.array([0]), np.array([1]))[0, 1])
    everything = Sampling(1.0, top_p=0.5, stop_tokens=tuple(range(TINY.vocab_size)), min_tokens=3)
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    serve(engine, [Request(0, (1,), 5, everything)])
    assert [len(completion) for completion in engine.completions[0]] == [4]
