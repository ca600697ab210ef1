"""A model that computes NaN for some: they end in an error, the others answer as ever."""

import jax.numpy as jnp
import numpy as np
import pytest
from pagedattn_serving.decoding.beam import Beam
from pagedattn_serving.decoding.request import NO_TOKEN
from pagedattn_serving.decoding.sampling import GREEDY, Sampling
from pagedattn_serving.decoding.sampling_device import greedy_rows, narrow_rows, pick_rows
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute
from test_serving import SWAP, TIGHT, nothing_is_lost
from tiny import QUICK, ROOMY, TINY, serve, tiny_params, tiny_requests

pytestmark = pytest.mark.usefixtures("exact_products")
LENGTHS = (5, 19, 12, 9, 3, 14)


def served(requests, nan_token=None, limits=ROOMY, policy=Recompute):
    """The engine, and what it streamed, with a model in which one token's embedding is NaN."""
    params = tiny_params()
    if nan_token is not None:
        params = params | {"embedding": params["embedding"].at[nan_token].set(jnp.nan)}
    engine = Engine(params, TINY, limits, QUICK, policy)
    streamed = [token for step in serve(engine, requests) for token in step.tokens]
    nothing_is_lost(engine)
    return engine, streamed


@pytest.mark.parametrize(
    ("limits", "policy"), [(ROOMY, Recompute), (TIGHT, Recompute), (TIGHT, SWAP)]
)
def test_text_ends_where_nan_begins(limits, policy):
    requests = tiny_requests(LENGTHS)
    calm, _ = served(requests)
    failed = 0
    for nan_token in range(0, TINY.vocab_size, 6):
        engine, streamed = served(requests, nan_token, limits, policy)
        for request in requests:
            (text,) = calm.completions[request.id]
            fed = [*request.prompt, *text[:-1]]
            got = [token.token for token in streamed if token.request == request.id]
            if nan_token not in fed:
                assert engine.completions[request.id] == [text]
                continue
            known = max(fed.index(nan_token) + 1 - len(request.prompt), 0)
            assert got == [*text[:known], NO_TOKEN]
            assert request.id not in engine.completions
            failed += 1
    assert failed


@pytest.mark.parametrize("decoding", [GREEDY, Sampling(0.9, 3, seed=2, top_k=5), Beam(3)])
def test_every_live_sample_gets_its_end(decoding):
    *others, _ = tiny_requests(LENGTHS)
    *_, request = tiny_requests(LENGTHS, decoding)
    calm, _ = served(others)
    nan_token = request.prompt[-1]
    texts = {other.id: [*other.prompt, *calm.completions[other.id][0]] for other in others}
    safe = [other for other in others if nan_token not in texts[other.id]]
    engine, streamed = served([*safe, request], nan_token)
    ends = [token for token in streamed if token.request == request.id]
    assert safe
    assert {token.reason for token in ends} == {"error"}
    assert all(token.final for token in ends)
    assert sorted(t.sample for t in ends) == list(range(getattr(decoding, "num_samples", 1)))
    assert engine.completions == {other.id: calm.completions[other.id] for other in safe}


@pytest.mark.parametrize("nan", [np.nan, -np.nan])
def test_one_logit_of_nan_is_enough(nan):
    logits = np.random.default_rng(0).normal(size=(3, 12)).astype(np.float32)
    logits[1, 4] = nan
    warm, ints = np.full(3, 0.8, np.float32), np.zeros(3, np.int32)
    narrow = narrow_rows(logits, warm, ints + 2, np.full(3, 0.5, np.float32))
    for tokens in (
        greedy_rows(logits),
        pick_rows(logits, ints, ints, ints, warm),
        pick_rows(narrow, ints, ints, ints, warm),
    ):
        assert (np.asarray(tokens) == NO_TOKEN).tolist() == [False, True, False]
