"""A cancelled request is gone at once, wherever it was, and the others answer as without it."""

from dataclasses import replace

import pytest
from pagedattn_serving.decoding.beam import Beam
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY, Sampling
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute
from test_serving import SWAP, TIGHT, nothing_is_lost
from tiny import LIMITS, QUICK, ROOMY, TINY, tiny_params, tiny_requests

pytestmark = pytest.mark.usefixtures("exact_products")


def engine_with(requests, limits=ROOMY, preemption=Recompute):
    engine = Engine(tiny_params(), TINY, limits, QUICK, preemption)
    for request in requests:
        engine.submit(request)
    return engine


def drained(engine):
    """The tokens of all further steps."""
    streamed = []
    while not engine.idle:
        streamed += engine.step().tokens
    return streamed


def requests_with(decoding):
    """Five requests of which the third is decoded so."""
    requests = [replace(r, max_new_tokens=9) for r in tiny_requests((5, 19, 12, 9, 3))]
    requests[2] = replace(requests[2], decoding=decoding)
    return requests


@pytest.mark.parametrize("decoding", [GREEDY, Sampling(0.9, 3, seed=2), Beam(3)])
@pytest.mark.parametrize("steps", [0, 1, 2, 5, 8])
def test_a_request_is_cancelled_in_every_state(decoding, steps):
    requests = requests_with(decoding)
    others = [request for request in requests if request.id != 2]
    calm = engine_with(others)
    drained(calm)
    engine = engine_with(requests)
    for _ in range(steps):
        engine.step()
    assert engine.cancel(2)
    streamed = drained(engine)
    assert 2 not in {token.request for token in streamed}
    assert engine.completions == calm.completions
    nothing_is_lost(engine)


@pytest.mark.parametrize("policy", [Recompute, SWAP])
def test_a_preempted_request_is_cancelled(policy):
    requests = [replace(request, max_new_tokens=14) for request in tiny_requests((9, 10, 11, 12))]
    engine = engine_with(requests, TIGHT, policy)
    while not engine.scheduler.num_preemptions:
        engine.step()
    (victim,) = [group.request.id for group in engine.scheduler.waiting][:1]
    assert engine.cancel(victim)
    drained(engine)
    assert sorted(engine.completions) == [r.id for r in requests if r.id != victim]
    nothing_is_lost(engine)
    if policy is SWAP:
        assert [pool.num_free for pool in engine.scheduler.preemption.pools] == [20]
        assert sorted(engine.scheduler.preemption.free_rows) == list(range(5))


def test_a_cancelled_id_can_be_used_again_at_once():
    prompt = tiny_requests((9,))[0].prompt
    engine = engine_with([Request(7, prompt, 9, GREEDY)])
    for _ in range(4):
        engine.step()
    engine.cancel(7)
    engine.submit(Request(7, prompt, 5, GREEDY))
    assert [token.token for token in drained(engine)] == engine.completions[7][0]
    assert len(engine.completions[7][0]) == 5


def test_unknown_and_finished_ids_change_nothing():
    engine = engine_with(tiny_requests((5,)))
    assert not engine.cancel(3)
    drained(engine)
    finished = dict(engine.completions)
    assert not engine.cancel(0)
    assert engine.completions == finished
    assert engine.idle


def test_an_id_in_use_is_refused():
    engine = engine_with(tiny_requests((5,)), LIMITS)
    with pytest.raises(ValueError, match="request 0 is waiting or running"):
        engine.submit(tiny_requests((3,))[0])


@pytest.mark.parametrize("token", [-1, TINY.vocab_size, 2**40])
def test_a_token_that_the_model_lacks_is_refused(token):
    """It was served as another one, or ended every later step."""
    engine = engine_with(tiny_requests((5,)), LIMITS)
    with pytest.raises(ValueError, match=f"tokens from 0 to .* of request 7, got {token}"):
        engine.submit(replace(tiny_requests((3,))[0], id=7, prompt=(1, token)))
    assert len(drained(engine)) > 0


def test_the_end_of_each_sample_is_told():
    requests = requests_with(Sampling(0.9, 2, seed=1))
    requests[1] = replace(requests[1], decoding=Beam(2))
    free = engine_with(requests)
    drained(free)
    stop = free.completions[0][0][4]
    engine = Engine(tiny_params(), replace(TINY, eos_token_id=stop), ROOMY, QUICK)
    last = {}
    for token in engine.stream(requests):
        assert (token.request, token.sample) not in last or not last[token.request, token.sample][0]
        last[token.request, token.sample] = token.final, token.reason, token.token
    for (request, sample), (final, reason, token) in last.items():
        completion = engine.completions[request][sample]
        assert final
        assert token == completion[-1]
        assert reason == ("stop" if token == stop else "length")
    assert {reason for _, reason, _ in last.values()} == {"stop", "length"}
