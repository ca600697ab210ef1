"""A batch-invariant engine: log-probabilities have the same bits alone and in any company."""

import functools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.checkpoint.tokenizer import load_tokenizer
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import Sampling
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.engine import next_logits as next_logits_module
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute, Swap
from pagedattn_serving.families.forward import forward_paged
from pagedattn_serving.families.fused import fused
from tiny import LIMITS as TINY_LIMITS
from tiny import TINY, serve, tiny_params, tiny_requests

ROOMY = Limits(
    num_blocks=60, block_size=8, max_seq_len=64, max_seqs=6, token_budget=24, max_query_len=10
)
TIGHT = replace(ROOMY, num_blocks=12)
SWAP = functools.partial(Swap, num_blocks=40, num_rows=6)
DECODINGS = (  # some ask for more of the likeliest than others, or narrow what may be drawn
    Sampling(logprobs=0),
    Sampling(0.9, 2, seed=1, logprobs=3),
    Sampling(logprobs=17),
    Sampling(1.2, seed=2, top_k=20, top_p=0.9, logprobs=1),
)


@functools.cache
def demo():
    model, params = load_checkpoint(SHIPPED)
    return model, fused(params)


@functools.cache
def requests() -> list[Request]:
    """Of prompts of 1 to 36 tokens, two of which begin alike."""
    encode = load_tokenizer(SHIPPED).encode
    prompts = [tuple(encode(prompt))[:36] for prompt in PROMPTS[:5]]
    prompts += [(*max(prompts, key=len)[:33], 7), prompts[0][:1]]
    decodings = DECODINGS * 2
    return [Request(i, p, 12 - i % 3, decodings[i]) for i, p in enumerate(prompts)]


def engine_of(limits=ROOMY, policy=Recompute) -> Engine:
    model, params = demo()
    return Engine(params, model, limits, preemption=policy, batch_invariant=True)


def answers(engine: Engine, asked: list[Request]) -> dict[int, list]:
    """By request what was streamed of it, log-probabilities included, sample by sample."""
    streamed = sorted(engine.stream(asked), key=lambda token: token.sample)
    return {r.id: [token for token in streamed if token.request == r.id] for r in asked}


@functools.cache
def alone() -> dict[int, list]:
    """Each request in an engine of its own."""
    return {r.id: answers(engine_of(), [r])[r.id] for r in requests()}


@settings(max_examples=8, deadline=None)
@given(
    waves=st.lists(st.lists(st.integers(0, 6), min_size=1, unique=True), min_size=1, max_size=3),
    limits=st.sampled_from([ROOMY, TIGHT]),
    policy=st.sampled_from([Recompute, SWAP]),
)
def test_log_probabilities_are_those_of_the_request_alone(waves, limits, policy):
    engine = engine_of(limits, policy)
    for wave in waves:  # later ones find what the prefix cache kept of those before
        found = answers(engine, [requests()[index] for index in wave])
        assert found == {index: alone()[index] for index in wave}


@pytest.mark.parametrize("policy", [Recompute, SWAP])
def test_they_are_where_prefixes_are_found_and_requests_preempted(policy):
    engine = engine_of(TIGHT, policy)
    assert answers(engine, requests()) == alone()
    assert engine.scheduler.num_preemptions > 0
    hits = engine.prefixes.num_hit_tokens
    assert answers(engine, requests()[::-1]) == alone()
    assert engine.prefixes.num_hit_tokens > hits


def test_all_steps_are_one_program(monkeypatch):
    traced = []

    def counting(params, model, tokens, *rest):
        traced.append(len(tokens))
        return forward_paged(params, model, tokens, *rest)

    monkeypatch.setattr(next_logits_module, "forward_paged", counting)
    model = replace(TINY, rope_theta=9998.0)  # that no other test has traced
    serve(Engine(tiny_params(), model, TINY_LIMITS, batch_invariant=True), tiny_requests())
    assert traced == [TINY_LIMITS.token_budget]
