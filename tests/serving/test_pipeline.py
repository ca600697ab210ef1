"""The device is never kept waiting: what crosses to the host, when, and how many programs run."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from pagedattn_serving.decoding import sampling_device
from pagedattn_serving.decoding.beam import Beam
from pagedattn_serving.decoding.request import IN_FLIGHT
from pagedattn_serving.decoding.sampling import GREEDY, Sampling
from pagedattn_serving.decoding.sampling_device import Drawn
from pagedattn_serving.engine import engine as engine_module
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute
from test_sampling_device import mixed_requests
from test_serving import SWAP, TIGHT, nothing_is_lost
from tiny import LIMITS, QUICK, ROOMY, TINY, serve, tiny_params, tiny_requests

pytestmark = pytest.mark.usefixtures("exact_products")


@pytest.fixture
def read(monkeypatch) -> list[jax.Array]:
    """The arrays of JAX that NumPy has read since."""
    arrays, asarray = [], np.asarray

    def recording(array, *args, **kwargs):
        if isinstance(array, jax.Array):
            arrays.append(array)
        return asarray(array, *args, **kwargs)

    monkeypatch.setattr(np, "asarray", recording)
    return arrays


def decodings(*ours):
    requests = [replace(r, max_new_tokens=6) for r in tiny_requests((5, 19, 3))]
    return [replace(r, decoding=d) for r, d in zip(requests, ours, strict=False)]


def test_logits_stay_on_the_device(read):
    plain = decodings(GREEDY, Sampling(0.9, 2, seed=1), Sampling(2.0, top_k=3))
    serve(Engine(tiny_params(), TINY, ROOMY, QUICK), plain)
    assert read
    assert {array.dtype.name for array in read} <= {"int32", "bool"}


def test_only_the_likeliest_cross_for_those_who_ask(read):
    asking = decodings(Sampling(logprobs=2), GREEDY, Beam(3))
    serve(Engine(tiny_params(), TINY, ROOMY, QUICK), asking)
    shapes = {array.shape for array in read if array.dtype == np.float32}
    assert shapes == {(6,), (6, 2), (6, 8)}  # of 31 tokens


def test_the_next_forward_is_enqueued_before_the_last_is_read(monkeypatch):
    events, forward, take = [], engine_module.next_logits, Drawn.read

    def launch(*args):
        events.append("launch")
        return forward(*args)

    def reading(drawn):
        events.append("read")
        return take(drawn)

    monkeypatch.setattr(engine_module, "next_logits", launch)
    monkeypatch.setattr(Drawn, "read", reading)
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    for request in tiny_requests((3, 2)):
        engine.submit(request)
    streamed = 0
    while not engine.idle:
        streamed += len(engine.step().tokens)
    assert streamed == 4 + 5
    assert events == ["launch", *["launch", "read"] * 4, "read"]


def test_one_program_draws_for_every_mix(monkeypatch):
    traced = {"pick": 0, "narrowed": 0}
    for name in traced:
        original = getattr(sampling_device, name)
        monkeypatch.setattr(sampling_device, name, counting(original, traced))
    limits = replace(ROOMY, max_seqs=9)  # a shape that no other test has compiled
    serve(Engine(tiny_params(), TINY, limits, QUICK), mixed_requests())
    assert traced == {"pick": 1, "narrowed": 1}


def counting(function, counts):
    def counted(*args):
        counts[function.__name__] += 1
        return function(*args)

    return counted


@pytest.mark.parametrize("policy", [Recompute, SWAP])
def test_stop_tokens_are_found_late_and_change_nothing(policy):
    requests = tiny_requests((1, 9, 3, 25, 8, 2, 7, 12, 5))
    kinds = [GREEDY, Sampling(6.0, 2, seed=3), Beam(2), Sampling(5.0, seed=8, top_p=0.9)]
    requests = [replace(r, decoding=kinds[r.id % 4], max_new_tokens=9) for r in requests]
    model = replace(TINY, eos_token_id=(3, 8, 12, 20, 27))
    calm, tight = (Engine(tiny_params(), model, limits, QUICK, policy) for limits in (ROOMY, TIGHT))
    calm_tokens, tight_tokens = ([*engine.stream(requests)] for engine in (calm, tight))
    assert tight.completions == calm.completions
    assert sorted(tight_tokens) == sorted(calm_tokens)
    assert {token.reason for token in tight_tokens} == {"stop", "length", None}
    assert tight.scheduler.num_preemptions > 0
    assert not any(IN_FLIGHT in c for cs in tight.completions.values() for c in cs)
    for engine in (calm, tight):
        nothing_is_lost(engine)


def test_generated_blocks_are_found_again():
    """They are named once their tokens have been read, not while they are in flight."""
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    (request,) = [replace(r, max_new_tokens=14) for r in tiny_requests((5,))]
    serve(engine, [request])
    longer = replace(request, prompt=(*request.prompt, *engine.completions[0][0], 7))
    serve(engine, [longer])
    assert engine.prefixes.num_hit_tokens == 16  # of 18 that were fed
    fresh = Engine(tiny_params(), TINY, ROOMY, QUICK)
    serve(fresh, [longer])
    assert engine.completions == fresh.completions


def test_scores_come_when_asked_for(read):
    engine = Engine(tiny_params(), TINY, LIMITS, QUICK)
    steps = serve(engine, tiny_requests((5, 3)))
    assert all(array.dtype != np.float32 for array in read)
    scores = [step.scores[1] for step in steps if step.tokens and 1 in step.scores]
    assert [rows.shape for rows in scores] == [(1, TINY.vocab_size)] * 5
    assert [int(rows.argmax()) for rows in scores] == engine.completions[1][0]
