"""How long a prompt and its answer may be is what the engine can serve, with windows or without."""

from dataclasses import replace
from types import SimpleNamespace

import httpx
import jax
import pytest
from http_server import ask, serving
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.blocks.memory import Memory
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import Sampling
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute
from pagedattn_serving.engine.prefix_cache import PrefixCache
from pagedattn_serving.engine.scheduler import Scheduler
from pagedattn_serving.server.launch import Loaded
from pagedattn_serving.training.initial import init_params
from test_window_pools import BOTH
from tiny import QUICK

WINDOW = BOTH.sliding_window
MODELS = {
    "windows alone": (WINDOW, WINDOW),
    "both": (None, WINDOW),
    "none": (None, None),
}
few = st.integers


@given(
    sizes=st.tuples(few(1, 12), few(1, 4), few(1, 40), few(1, 3), few(1, 9)),
    windows=st.lists(st.none() | few(1, 20), min_size=1, max_size=3),
    data=st.data(),
)
def test_the_engine_takes_what_the_server_says_and_not_a_token_more(sizes, windows, data):
    num_blocks, block_size, max_seq_len, max_seqs, max_query_len = sizes
    limits = Limits(num_blocks, block_size, max_seq_len, max_seqs, 64, max_query_len)
    model = SimpleNamespace(windows=tuple(windows), vocab_size=9, init_cache=lambda *sizes: None)
    width = data.draw(few(1, min(max_seqs, num_blocks)))
    longest = Loaded("any", model, {}, None).served(limits).longest(width)
    memory = Memory(limits, model)
    scheduler = Scheduler(memory, PrefixCache(memory), Recompute(memory))
    samples = Sampling(num_samples=width)
    scheduler.submit(Request(0, (1,), longest - 1, samples))
    with pytest.raises(ValueError, match=f"at most {longest - 1} fit"):
        scheduler.submit(Request(1, (1,), longest, samples))


@pytest.mark.parametrize("name", MODELS)
def test_a_request_of_that_length_ends_and_one_longer_is_refused(tmp_path, name):
    layers = tuple("sliding_attention" if window else "full_attention" for window in MODELS[name])
    model = replace(BOTH, vocab_size=256, layer_types=layers)
    limits = Limits(num_blocks=6, block_size=4, max_seq_len=40, max_seqs=4, max_query_len=8)
    engine = Engine(init_params(model, jax.random.key(0)), model, limits, QUICK)
    with serving(engine, tmp_path, windows=model.windows) as server:
        (about,) = httpx.get(f"{server.url}/v1/models").json()["data"]
        longest = about["max_model_len"]
        assert longest == (41 if name == "windows alone" else 25)
        for prompt in ("abcdefghi", "a" * (longest - 1)):
            room = longest - len(prompt)
            answer = ask(server.url, prompt, max_tokens=room).json()
            assert answer["usage"]["total_tokens"] == longest
            assert answer["choices"][0]["finish_reason"] == "length"
            refused = ask(server.url, prompt, max_tokens=room + 1).json()["error"]
            assert refused["code"] == "context_length_exceeded"
            assert f"{longest} fit" in refused["message"]
        refused = ask(server.url, "a" * longest).json()["error"]
        assert (refused["code"], refused["param"]) == ("context_length_exceeded", "prompt")
        assert f"at most {longest - 1} fit" in refused["message"]
