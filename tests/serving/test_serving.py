"""Serving on a tiny random model: preemption, shared prefixes, samples, beams, streams."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedattn_serving.blocks.memory import Memory
from pagedattn_serving.decoding.beam import Beam
from pagedattn_serving.decoding.request import Found, Request, Turn
from pagedattn_serving.decoding.sampling import GREEDY, Sampling
from pagedattn_serving.decoding.sampling_device import pick
from pagedattn_serving.demo.occupancy import blocks_used
from pagedattn_serving.demo.parity import dense_logits
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute, Swap
from pagedattn_serving.engine.prefix_cache import PrefixCache
from pagedattn_serving.engine.scheduler import Scheduler
from tiny import LIMITS, QUICK, ROOMY, TINY, serve, tiny_params, tiny_requests

pytestmark = pytest.mark.usefixtures("exact_products")
SWAP = partial(Swap, num_blocks=20, num_rows=5)
SMALL_SWAP = partial(Swap, num_blocks=3, num_rows=2)
POLICIES = {"recompute": Recompute, "swap": SWAP, "swap to a small host": SMALL_SWAP}
TIGHT = replace(LIMITS, num_blocks=10)


def completions_of(requests, limits=ROOMY, model=TINY, preemption=Recompute):
    engine = Engine(tiny_params(), model, limits, QUICK, preemption)
    serve(engine, requests)
    return engine.completions, engine


def logits_after(tokens):
    """The dense model's scores after each token; padded, so that one program serves all."""
    padded = np.zeros((1, 48), np.int32)
    padded[0, : len(tokens)] = tokens
    return np.asarray(dense_logits(tiny_params(), TINY, padded))[0, : len(tokens)]


def nothing_is_lost(engine):
    """All rows are free, and all blocks that the prefix cache does not hold."""
    (held,), (blocks,) = engine.prefixes.num_held, engine.memory.pools
    assert blocks.num_free + held == engine.limits.num_blocks
    assert sorted(engine.memory.free_rows) == list(range(engine.limits.max_seqs))
    engine.prefixes.evict([held])
    assert blocks.num_free == engine.limits.num_blocks


@pytest.mark.parametrize("policy", POLICIES)
def test_preempted_requests_answer_as_if_alone(policy):
    mixed = [
        replace(request, decoding=decoding)
        for request, decoding in zip(
            tiny_requests((1, 25, 3, 9, 8, 2, 17, 30, 5)),
            [GREEDY, GREEDY, Sampling(0.9, 2, seed=3), GREEDY, Beam(2)] * 2,
            strict=False,
        )
    ]
    requests = [replace(r, max_new_tokens=8) for r in mixed if len(r.prompt) < 12] + mixed[1:2]
    expected, calm = completions_of(requests)
    assert calm.scheduler.num_preemptions == 0
    completions, engine = completions_of(requests, TIGHT, preemption=POLICIES[policy])
    assert engine.scheduler.num_preemptions > 0
    assert completions == expected
    nothing_is_lost(engine)


def test_swapped_blocks_come_back_instead_of_being_computed():
    requests = [replace(request, max_new_tokens=14) for request in tiny_requests((9, 10, 11, 12))]
    tokens = {}
    for name in ("recompute", "swap"):
        engine = Engine(tiny_params(), TINY, TIGHT, QUICK, POLICIES[name])
        engine.prefixes.keep = lambda groups: None  # else recomputing finds its blocks again
        tokens[name], plan = 0, engine.scheduler.plan

        def counting(unread, plan=plan, name=name):
            steps = plan(unread)
            tokens[name] += sum(length for _, length in steps)
            return steps

        engine.scheduler.plan = counting
        serve(engine, requests)
        assert engine.scheduler.num_preemptions > 0
    assert tokens["swap"] == sum(request.max_cached for request in requests) < tokens["recompute"]


def test_caches_stay_where_they_are():
    requests = [replace(request, max_new_tokens=14) for request in tiny_requests((9, 10, 11, 12))]
    engine = Engine(tiny_params(), TINY, TIGHT, QUICK, SWAP)
    policy = engine.scheduler.preemption
    caches = (engine.memory.caches, policy.caches)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches)]
    serve(engine, requests)
    caches = (engine.memory.caches, policy.caches)
    assert before == [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(caches)]
    assert engine.scheduler.num_preemptions > 0


def test_pool_is_bounded():
    requests = tiny_requests()
    _, engine = completions_of(requests, LIMITS)
    steps = serve(engine, requests)
    worst_case = sum(LIMITS.blocks_for(request.max_cached) for request in requests)
    used = blocks_used(np.stack([step.owners for step in steps]))
    assert used.max() <= LIMITS.num_blocks < worst_case


def test_a_shared_prefix_is_computed_once():
    prompt = tiny_requests((21,))[0].prompt
    others = [Request(i, (*prompt[:18], i), 5, GREEDY) for i in range(1, 4)]
    expected, _ = completions_of(others)
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    serve(engine, [Request(0, prompt, 5, GREEDY)])
    assert engine.prefixes.num_hit_tokens == 0
    serve(engine, others)
    assert engine.prefixes.num_hit_tokens == 3 * 16  # four full blocks each
    assert {i: engine.completions[i] for i in expected} == expected
    nothing_is_lost(engine)


def test_a_prompt_of_full_blocks_still_computes_its_last_token():
    prompt = tiny_requests((16,))[0].prompt
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    serve(engine, [Request(0, prompt, 3, GREEDY)])
    serve(engine, [Request(1, prompt, 3, GREEDY)])
    assert engine.prefixes.num_hit_tokens == 12
    assert engine.completions[0] == engine.completions[1]


def test_prefixes_least_recently_used_go_first():
    first, second, third = (r.prompt for r in tiny_requests((17, 17, 17)))
    engine = Engine(tiny_params(), TINY, replace(LIMITS, num_blocks=10), QUICK)
    for index, prompt in enumerate((first, second, first, third)):  # 4 blocks each stay
        serve(engine, [Request(index, prompt, 2, GREEDY)])
    before = engine.prefixes.num_hit_tokens
    serve(engine, [Request(9, first, 2, GREEDY)])
    assert engine.prefixes.num_hit_tokens == before + 16


def test_equal_blocks_behind_different_prefixes_are_not_shared():
    first, second, block = (r.prompt for r in tiny_requests((4, 4, 4)))
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    for index, prompt in enumerate([(*first, *block, 5), (*second, 5)]):
        serve(engine, [Request(index, prompt, 2, GREEDY)])
    serve(engine, [Request(2, (*second, *block, 5), 2, GREEDY)])
    assert engine.prefixes.num_hit_tokens == 4


def test_samples_are_those_of_the_dense_model():
    decoding = Sampling(temperature=0.8, num_samples=3, seed=5)
    request = replace(tiny_requests((9,), decoding)[0], max_new_tokens=10)
    completions, engine = completions_of([request])
    for sample, completion in enumerate(completions[0]):
        tokens = list(request.prompt)
        for token in completion:
            logits = logits_after(tokens)[-1]
            assert token == pick(logits, 5, sample, len(tokens), 0.8)
            tokens.append(token)
    assert len({tuple(completion) for completion in completions[0]}) == 3
    nothing_is_lost(engine)


def test_samples_share_the_blocks_of_their_prompt():
    request = replace(tiny_requests((24,), Sampling(1.0, 3))[0], max_new_tokens=4)
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    steps = serve(engine, [request])
    assert blocks_used(np.stack([step.owners for step in steps])).max() == 6 + 3


def log_softmax(logits):
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def beams_of(prompt, decoding, stop_tokens, max_new_tokens):
    """Beam search by the book, each hypothesis computed anew."""
    live, finished = [((), 0.0)], []
    for length in range(1, max_new_tokens + 1):
        candidates = sorted(
            (
                (score + float(logp), (*tokens, token))
                for tokens, score in live
                for token, logp in enumerate(log_softmax(logits_after([*prompt, *tokens])[-1]))
            ),
            reverse=True,
        )[: 2 * decoding.num_beams]
        ending = [tokens[-1] in stop_tokens for _, tokens in candidates]
        best = zip(candidates, ending, strict=True)
        finished += [c for c, ends in list(best)[: decoding.num_beams] if ends]
        live = [(t, s) for (s, t), ends in zip(candidates, ending, strict=True) if not ends]
        live = live[: decoding.num_beams]
        if len(finished) >= decoding.num_beams:
            break
        if length == max_new_tokens:
            finished += [(score, tokens) for tokens, score in live]
    quality = [(score / len(t) ** decoding.length_penalty, t) for score, t in finished]
    return [list(tokens) for _, tokens in sorted(quality, reverse=True)[: decoding.num_beams]]


@pytest.mark.parametrize("stop_tokens", [(), (7, 12, 20)])
@pytest.mark.parametrize("limits", [ROOMY, replace(ROOMY, num_blocks=10)])
def test_beam_search_is_that_by_the_book(stop_tokens, limits):
    decoding, model = Beam(3, length_penalty=0.7), replace(TINY, eos_token_id=stop_tokens or None)
    requests = [replace(r, max_new_tokens=7) for r in tiny_requests((5, 6, 3), decoding)]
    completions, engine = completions_of(requests, limits, model)
    for request in requests:
        expected = beams_of(request.prompt, decoding, stop_tokens, 7)
        assert completions[request.id] == expected
    assert (engine.scheduler.num_preemptions > 0) == (limits.num_blocks < 20)
    nothing_is_lost(engine)


def test_tokens_are_streamed_as_they_come():
    requests = tiny_requests((5, 9, 3))
    requests[2] = replace(requests[2], decoding=Sampling(1.0, 2))
    requests.append(Request(3, (1, 2, 3), 5, Beam(2)))
    engine = Engine(tiny_params(), TINY, ROOMY, QUICK)
    streamed = list(engine.stream(requests))
    for request in requests:
        for sample in range(1 if request.id == 3 else request.decoding.width):
            tokens = [t.token for t in streamed if (t.request, t.sample) == (request.id, sample)]
            assert tokens == engine.completions[request.id][sample]
    assert streamed[0].request == 0
    assert {token.request for token in streamed[:6]} >= {0, 1, 2}


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(0, (), 3, GREEDY), "needs a prompt"),
        (Request(0, (1,), 0, GREEDY), "max_new_tokens"),
        (Request(0, (1,) * 40, 2, GREEDY), "41 tokens; at most 40"),
        (Request(0, (1,) * 10, 4, Beam(4)), "13 tokens; at most 12"),
        (Request(0, (1,), 4, Sampling(1.0, 5)), "5 sequences; at most 4"),
    ],
)
def test_a_request_that_could_never_run_is_refused(request_, message):
    engine = Engine(tiny_params(), TINY, LIMITS)
    with pytest.raises(ValueError, match=message):
        engine.submit(request_)


def test_a_request_that_just_fits_the_pool_is_served():
    request = Request(0, (1,) * 3, 38, GREEDY)
    completions, _ = completions_of([request], replace(LIMITS, num_blocks=10))
    assert len(completions[0][0]) == 38


@settings(max_examples=15)
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(1, 3)), max_size=10
    ),
    policy=st.sampled_from([Recompute, partial(Swap, num_blocks=6, num_rows=2)]),
)
def test_the_scheduler_brings_every_request_to_its_end(asked, policy):
    memory = Memory(replace(LIMITS, num_blocks=21))
    prefixes = PrefixCache(memory)
    scheduler = Scheduler(memory, prefixes, policy(memory))
    for index, (prompt, new, width) in enumerate(asked):
        decoding = Sampling(num_samples=width)
        scheduler.submit(Request(index, (index,) * prompt, new, decoding))
    lengths, steps = {}, 0
    while scheduler.waiting or scheduler.running:
        plan, steps = scheduler.plan(), steps + 1
        assert plan
        assert steps < 2000
        assert sum(length for _, length in plan) <= LIMITS.token_budget
        draws = []
        for sequence, length in plan:
            sequence.num_cached += length
            assert int(memory.pools[0].pool.seq_lens[sequence.row]) == sequence.num_cached
        for group in scheduler.running:
            fed = [s for s in group.sequences if any(s is t for t, _ in plan)]
            ready = [s for s in fed if not group.num_pending(s)]
            draws += group.request.decoding.draw(Turn(group, memory, ()), ready)
        prefixes.keep(scheduler.running)
        for draw in draws:
            turn = Turn(draw.group, memory, ())
            turn.group.request.decoding.read(turn, [(draw.sequence, Found(2))])
        for group in [group for group in scheduler.running if not group.sequences]:
            scheduler.retire(group)
            lengths[group.request.id] = list(map(len, group.completions()))
    assert lengths == {i: [new] * width for i, (_, new, width) in enumerate(asked)}
    assert memory.pools[0].num_free + prefixes.num_held[0] == 21
