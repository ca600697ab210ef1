"""Generation in one compiled program: the same tokens as served, in place, without the host."""

import functools
import re
from dataclasses import replace

import decode_loop as decode_loop_example
import jax
import numpy as np
import pytest
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import Sampling
from pagedattn_serving.engine import generation
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.generation import decode_loop, decode_step, prefill, start
from tiny import QUICK, ROOMY, TINY, serve, tiny_params, tiny_requests

from pagedattn import available_backends

pytestmark = pytest.mark.usefixtures("exact_products")
PROMPTS = [list(request.prompt) for request in tiny_requests((5, 9, 3))]
NEW = 12


@pytest.fixture(params=["xla", "sdpa"])
def backend(request) -> str:
    if request.param not in available_backends():
        pytest.skip(f"{request.param} is not installed")
    return request.param


def begin(model=TINY, temperature=0.0, backend="xla", num_blocks=30):
    """Prefilled sequences with different seeds."""
    sizes = {"max_new_tokens": NEW, "num_blocks": num_blocks, "block_size": 4}
    state = start(tiny_params(), model, PROMPTS, [0, 1, 2], **sizes)
    return prefill(tiny_params(), model, state, temperature, 9, backend)


def completions_of(state):
    rows = zip(state.tokens.tolist(), state.lengths.tolist(), PROMPTS, strict=True)
    return [tokens[len(prompt) : length] for tokens, length, prompt in rows]


@functools.cache
def served(model=TINY, temperature=0.0):
    """What the engine answers to the same."""
    engine = Engine(tiny_params(), model, ROOMY, QUICK)
    requests = [
        Request(seed, tuple(prompt), NEW, Sampling(temperature, seed=seed))
        for seed, prompt in enumerate(PROMPTS)
    ]
    serve(engine, requests)
    return [engine.completions[seed][0] for seed in range(len(PROMPTS))]


def test_greedy_tokens_are_the_engines(backend):
    state = decode_loop(tiny_params(), TINY, begin(backend=backend), 0.0, 99, backend)
    assert completions_of(state) == served()
    assert not state.live.any()
    assert not state.starved.any()


def test_sampled_tokens_are_the_engines():
    state = decode_loop(tiny_params(), TINY, begin(temperature=0.7), 0.7, 99, "xla")
    assert completions_of(state) == served(temperature=0.7)


def test_sequences_stop_one_by_one():
    stops = tuple(completion[index] for index, completion in enumerate(served(), start=3))
    model = replace(TINY, eos_token_id=stops)
    state = decode_loop(tiny_params(), model, begin(model, None), None, 99, "xla")
    assert completions_of(state) == served(model)
    assert len(set(state.lengths.tolist())) > 1


def test_the_loop_is_the_step_repeated():
    looped = decode_loop(tiny_params(), TINY, begin(), 0.0, 3, "xla")
    stepped = begin()
    for _ in range(3):
        stepped = decode_step(tiny_params(), TINY, stepped, 0.0, "xla")
    jax.tree.map(np.testing.assert_array_equal, looped.pool, stepped.pool)
    assert looped.tokens.tolist() == stepped.tokens.tolist()
    rest = decode_loop(tiny_params(), TINY, looped, 0.0, 99, "xla")
    assert completions_of(rest) == served()


def test_a_sequence_that_finds_no_block_ends_and_the_others_go_on():
    state = decode_loop(tiny_params(), TINY, begin(num_blocks=11), 0.0, 99, "xla")
    assert not state.live.any()
    assert state.starved.any()
    for ours, theirs in zip(completions_of(state), served(), strict=True):
        assert ours == theirs[: len(ours)]
    full = np.asarray(state.lengths == state.ends)
    assert (full | np.asarray(state.starved)).all()


def test_caches_and_pool_stay_where_they_are(backend):
    state = begin(backend=backend)
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.pool, state.caches))]
    state = decode_loop(tiny_params(), TINY, state, 0.0, 99, backend)
    after = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((state.pool, state.caches))]
    assert before == after


def test_no_temporary_grows_with_the_cache(backend):
    """XLA would have to put a copy of a cache somewhere."""
    sizes = []
    for num_blocks in (4_000, 64_000):
        state = jax.eval_shape(lambda n=num_blocks: begin(backend=backend, num_blocks=n))
        lowered = decode_loop.lower(tiny_params(), TINY, state, 0.0, 99, backend)
        sizes.append(lowered.compile().memory_analysis().temp_size_in_bytes)
    assert sizes[1] - sizes[0] < 1e6  # on a GPU, the pool's array of block counts is
    assert state.caches[0].key.size * 4 > 1e7


def test_a_whole_generation_traces_one_step(monkeypatch):
    traced, forward = [], generation.forward_paged

    def counting(*args):
        traced.append(args[2].shape)
        return forward(*args)

    monkeypatch.setattr(generation, "forward_paged", counting)
    model = replace(TINY, rope_theta=777.0)  # compiled by no other test
    state = begin(model)
    decode_loop(tiny_params(), model, state, 0.0, 99, "xla")
    assert traced == [(3 * 9,), (3,)]


def test_bookkeeping_runs_without_loops():
    """A GPU runs a loop in a program as many small programs, one after the other."""
    model = replace(TINY, num_hidden_layers=0)
    params = tiny_params() | {"layers": []}
    state = start(params, model, PROMPTS, [0, 1, 2], max_new_tokens=9, num_blocks=30)
    assert "stablehlo.while" not in decode_step.lower(params, model, state, None, "xla").as_text()


def test_the_example_compares_both_loops(capsys):
    assert decode_loop_example.main(new_tokens=5, num_blocks=64, backend=QUICK) == 0
    compiled, stepped = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"compiled: [\d.]+ ms a token, 1 round trips, in place: True", compiled)
    assert re.fullmatch(r"stepped: [\d.]+ ms a token, 5 round trips, in place: True", stepped)
