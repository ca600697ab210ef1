"""Parameters: each of OpenAI's is honoured, changes nothing or is refused; nothing is ignored."""

import inspect
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from pagedattn_serving.server.connection import refused
from pagedattn_serving.server.refusal import Refusal
from pagedattn_serving.server.request_schema import (
    UNSUPPORTED,
    WITHOUT_EFFECT,
    Parameters,
    read_chat,
    read_completion,
)

TEXT = {"model": "m", "prompt": "a"}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}]}
READERS = {"completion": (read_completion, TEXT), "chat": (read_chat, CHAT)}
THEIRS = {"completion": Completions, "chat": ChatCompletions}
NOT_SENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
# Values that ask for something, for each parameter that is computed.
HONOURED = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "seed": 7,
    "n": 2,
    "max_tokens": 9,
    "stop": "x",
    "stream": True,
    "logprobs": 2,
    "ignore_eos": True,
    "min_tokens": 3,
    "stop_token_ids": [5],
    "add_special_tokens": False,
}
# What vLLM's clients know beyond OpenAI's, with the values that vLLM takes for nothing.
VLLM = (
    {"best_of": 1, "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "top_k": 0}
    | {"use_beam_search": False, "stop_token_ids": [], "include_stop_str_in_output": False}
    | {"ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True, "priority": 0}
    | {"spaces_between_special_tokens": True, "truncate_prompt_tokens": None, "bad_words": []}
    | {"allowed_token_ids": None, "prompt_logprobs": None, "logits_processors": [], "echo": False}
    | {"structured_outputs": None, "return_token_ids": False, "cache_salt": None}
    | {"return_tokens_as_token_ids": False, "kv_transfer_params": None, "vllm_xargs": {}}
    | {"guided_choice": None, "guided_decoding_backend": "auto", "request_id": None}
    | {"presence_penalty": 0.0, "frequency_penalty": 0.0, "logit_bias": {}, "suffix": None}
)
VLLM_CHATS = (
    {"add_generation_prompt": True, "continue_final_message": False, "chat_template": None}
    | {"chat_template_kwargs": {}, "documents": [], "mm_processor_kwargs": {}}
    | {"include_reasoning": True, "top_logprobs": 0, "logprobs": False, "tools": []}
    | {"tool_choice": "none", "parallel_tool_calls": True, "reasoning_effort": "none"}
)
WORDS = st.text(max_size=5) | st.just("\ud800")  # half a surrogate pair is JSON too
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=8,
)


def read_or_refused(read, body) -> Parameters | Refusal:
    try:
        return read(body)
    except Refusal as refusal:
        return refusal


def known(name):
    return [*HONOURED, *UNSUPPORTED, *WITHOUT_EFFECT, "model", *READERS[name][1]]


@pytest.mark.parametrize("name", READERS)
def test_every_parameter_of_the_official_client_is_known(name):
    theirs = set(inspect.signature(THEIRS[name].create).parameters) - NOT_SENT
    extra = {"stream_options", "top_logprobs", "max_completion_tokens"}
    assert theirs <= {*known(name), *extra}


@pytest.mark.parametrize("name", READERS)
def test_what_is_honoured_changes_what_is_asked(name):
    read, body = READERS[name]
    for param, value in HONOURED.items():
        value = True if (name, param) == ("chat", "logprobs") else value
        assert read(body | {param: value}) != read(body), param
        assert read(body | {param: None}) == read(body), param


@pytest.mark.parametrize("param", UNSUPPORTED)
@pytest.mark.parametrize("name", READERS)
def test_what_is_not_computed_is_refused_unless_it_asks_for_nothing(name, param):
    read, body = READERS[name]
    for neutral in (None, *UNSUPPORTED[param]):
        assert read(body | {param: neutral}) == read(body)
    with pytest.raises(Refusal) as refused:
        read(body | {param: {"type": "json_object"}})
    assert refused.value.param == param


@pytest.mark.parametrize("name", READERS)
def test_vllms_parameters_are_taken_at_the_values_that_ask_for_nothing(name):
    read, body = READERS[name]
    neutral = VLLM | (VLLM_CHATS if name == "chat" else {})
    assert read(body | neutral) == read(body)
    for param, value in neutral.items():
        assert read(body | {param: value}) == read(body), param
    streamed = {"stream": True, "stream_options": {"continuous_usage_stats": False}}
    assert read(body | streamed) == read(body | {"stream": True})


@pytest.mark.parametrize("name", READERS)
@given(st.data())
def test_junk_is_read_or_refused(name, data):
    """By a Refusal with a status and JSON, whatever the value of whatever parameter."""
    read, body = READERS[name]
    params = st.sampled_from(sorted({*known(name), "stream_options", "top_logprobs"}))
    body = data.draw(st.dictionaries(params, JUNK, max_size=4).map(lambda junk: body | junk) | JUNK)
    got = read_or_refused(read, body)
    if isinstance(got, Refusal):
        assert got.status == 400
        assert json.loads(refused(got).body) == got.body
    else:
        hash((got.prompts, got.stop))


@pytest.mark.parametrize("name", READERS)
def test_null_stands_for_what_is_not_given_among_the_streams_options_too(name):
    read, body = READERS[name]
    streamed = read(body | {"stream": True})
    for option in ("include_usage", "include_obfuscation", "of another server"):
        assert read(body | {"stream": True, "stream_options": {option: None}}) == streamed


@given(WORDS.map(lambda word: f"no {word}"))
def test_a_name_that_nobody_knows_is_told_as_text(name):
    message = {**CHAT["messages"][0], name: 1}
    bodies = (
        (read_completion, TEXT | {name: 1}),
        (read_completion, TEXT | {"stream": True, "stream_options": {name: 1}}),
        (read_chat, CHAT | {"messages": [message]}),
    )
    for read, body in bodies:
        got = read_or_refused(read, body)
        assert isinstance(got, Refusal)
        assert json.loads(refused(got).body) == got.body


def test_an_answer_may_be_sent_back_among_the_messages():
    told = {"role": "assistant", "content": "b", "refusal": None, "tool_calls": []}
    messages = [*CHAT["messages"], told | {"annotations": [], "audio": None}]
    assert read_chat(CHAT | {"messages": messages}).messages[1]["content"] == "b"
    told["tool_calls"] = [{"id": "1"}]
    with pytest.raises(Refusal, match=r"messages\[0\].tool_calls"):
        read_chat(CHAT | {"messages": [told]})


def test_completions_are_echoed_and_chats_are_not():
    assert read_completion(TEXT | {"echo": True}).echo
    for read, body in ((read_chat, CHAT), (read_completion, TEXT | {"logprobs": 0})):
        with pytest.raises(Refusal, match="echo"):
            read(body | {"echo": True})


@given(JUNK)
def test_junk_in_messages_is_read_or_refused(junk):
    for message in (junk, {"role": "user", "content": junk}, {"role": junk, "content": "a"}):
        got = read_or_refused(read_chat, CHAT | {"messages": [message]})
        if isinstance(got, Refusal):
            assert (got.param or "").startswith("messages[0]")
            assert json.loads(refused(got).body) == got.body
        else:
            assert isinstance(got.messages[0]["content"], str)


def test_parts_of_text_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    got = read_chat(CHAT | {"messages": [{"role": "user", "content": parts}]})
    assert got.messages == ({"role": "user", "content": "ab"},)
    image = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(Refusal, match=r"content\[0\]"):
        read_chat(CHAT | {"messages": [{"role": "user", "content": [image]}]})


def test_both_names_of_the_longest_answer_are_one():
    assert read_chat(CHAT | {"max_completion_tokens": 5}).max_tokens == 5
    with pytest.raises(Refusal, match="max_completion_tokens"):
        read_chat(CHAT | {"max_completion_tokens": 5, "max_tokens": 6})
