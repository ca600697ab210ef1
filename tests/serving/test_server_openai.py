"""OpenAI's own client against the server of a tiny model, held to the engine's own answers."""

import contextlib
import functools
from dataclasses import replace

import jax
import numpy as np
import openai
import pytest
from http_server import ECHO, serving
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import Sampling
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.training.initial import large_params
from tiny import ROOMY, TINY

BYTES = replace(TINY, vocab_size=256)
ENDING = replace(BYTES, eos_token_id=tuple(range(0, 256, 9)))
PROMPT = "to be"
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
CHAT = [{"role": "user", "content": PROMPT}]


def engine(model=BYTES):
    with jax.ensure_compile_time_eval():
        params = large_params(model, jax.random.key(0))
    return Engine(params, model, ROOMY, "xla")


@contextlib.contextmanager
def client_of(engine, folder):
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with (
        serving(engine, folder) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with client_of(engine(), tmp_path_factory.mktemp("model")) as client:
        yield client


@pytest.fixture(scope="module")
def alone():
    """The tokens of each sample, as the engine gives them by itself."""
    return functools.partial(answers, engine())


def answers(engine, prompt, count, **sampling):
    request = Request(0, tuple(prompt.encode()), count, Sampling(**sampling))
    samples = {}
    for token in engine.stream([request]):
        samples.setdefault(token.sample, []).append(token)
    return [samples[index] for index in sorted(samples)]


def text_of(tokens):
    kept = [t.token for t in tokens if t.reason != "stop"]
    return bytes(kept).decode(errors="replace")


SAMPLINGS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.5, "seed": 5, "top_p": 0.8, "top_k": 20},
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("n", [1, 3])
def test_completions_are_the_engines(client, alone, sampling, n):
    expected = alone(PROMPT, 12, num_samples=n, **sampling)
    extra = {"top_k": sampling.get("top_k")}
    given = {name: value for name, value in sampling.items() if name != "top_k"}
    options = {
        "model": ECHO,
        "prompt": PROMPT,
        "max_tokens": 12,
        "n": n,
        "extra_body": extra,
        **given,
    }
    whole = client.completions.create(**options)
    assert [choice.text for choice in whole.choices] == [text_of(tokens) for tokens in expected]
    assert [c.finish_reason for c in whole.choices] == [tokens[-1].reason for tokens in expected]
    assert whole.usage.completion_tokens == sum(map(len, expected))
    assert whole.usage.prompt_tokens == len(PROMPT)

    texts, ends, usage = [""] * n, [None] * n, None
    options |= {"stream": True, "stream_options": {"include_usage": True}}
    for chunk in client.completions.create(**options):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        assert not (usage and chunk.usage)
        usage = chunk.usage or usage
    assert texts == [choice.text for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_chats_are_completions_of_the_template(client, alone):
    [expected] = alone(f"user:{PROMPT};", 10)
    options = {"model": ECHO, "messages": CHAT, "temperature": 0, "max_tokens": 10}
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == text_of(expected)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text_of(expected)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_what_ends_an_answer_is_as_asked(tmp_path):
    asked = {"temperature": 1.0, "seed": 4}
    alone = functools.partial(answers, engine(ENDING), PROMPT, 12, **asked)
    [free] = alone(ignore_eos=True)
    ids = [token.token for token in free]
    assert {*ids} & {*ENDING.stop_tokens}
    with client_of(engine(ENDING), tmp_path) as client:
        for ignored, stops, least in (
            (False, (), 0),
            (True, (), 0),
            (True, (ids[5],), 0),
            (False, (ids[0],), 4),
        ):
            [expected] = alone(ignore_eos=ignored, stop_tokens=stops, min_tokens=least)
            extra = {"ignore_eos": ignored, "stop_token_ids": stops, "min_tokens": least}
            options = {"model": ECHO, "prompt": PROMPT, "max_tokens": 12, "extra_body": extra}
            choice = client.completions.create(**options, **asked).choices[0]
            assert (choice.text, choice.finish_reason) == (text_of(expected), expected[-1].reason)
            assert len(expected) > least
            if ignored:
                assert len(expected) == (ids.index(ids[5]) + 1 if stops else 12)


def test_a_chat_may_fill_the_context(client):
    answer = client.chat.completions.create(model=ECHO, messages=CHAT, temperature=0)
    longest = client.models.retrieve(ECHO).max_model_len
    assert answer.choices[0].finish_reason == "stop" or answer.usage.total_tokens == longest


def test_logprobs_are_the_engines(client, alone):
    [expected] = alone(PROMPT, 8, logprobs=3)
    options = {"model": ECHO, "temperature": 0, "max_tokens": 8}
    told = client.completions.create(prompt=PROMPT, logprobs=3, **options).choices[0]
    logprobs = [token.logprob for token in expected]
    np.testing.assert_allclose(told.logprobs.token_logprobs, logprobs, rtol=1e-4, atol=1e-4)
    assert told.logprobs.text_offset[0] == 0
    [expected] = alone(f"user:{PROMPT};", 8, logprobs=3)
    options |= {"messages": CHAT, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**options).choices[0].logprobs.content
    chunks = client.chat.completions.create(**options, stream=True)
    streamed = [c.choices[0].logprobs for c in chunks]
    assert [t for logprobs in streamed if logprobs for t in logprobs.content] == whole
    for token, theirs in zip(expected, whole, strict=True):
        assert theirs.bytes == [token.token]
        assert [top.bytes[0] for top in theirs.top_logprobs] == [t for t, _ in token.top_logprobs]


def test_a_stop_string_ends_a_sample_and_not_the_others(client, alone):
    samples = alone(PROMPT, 12, num_samples=3, temperature=1.0, seed=11)
    texts = [text_of(tokens) for tokens in samples]
    stop = texts[0][4:6]
    answer = client.completions.create(
        model=ECHO, prompt=PROMPT, max_tokens=12, n=3, temperature=1.0, seed=11, stop=stop
    )
    for choice, text, tokens in zip(answer.choices, texts, samples, strict=True):
        assert choice.text == text.split(stop)[0]
        assert choice.finish_reason == ("stop" if stop in text else tokens[-1].reason)


def test_errors_are_the_clients_own(client):
    options = {"model": ECHO, "prompt": PROMPT}
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**options, logit_bias={"5": 1})
    assert refused.value.param == "logit_bias"
    assert refused.value.code == "unsupported_parameter"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt=PROMPT)
    with pytest.raises(openai.BadRequestError, match="fit together"):
        client.completions.create(**options, max_tokens=1000)
