"""The server over real sockets: hostile clients, full queues, failing engines, ends."""

import asyncio
import concurrent.futures
import json
import socket
import threading

import httpx
import pytest
from http_server import ECHO, SECONDS, EchoEngine, ask, begin, eventually, rest_of, serving
from pagedattn_serving.decoding.request import NO_TOKEN, Streamed
from pagedattn_serving.server.refusal import Refusal
from pagedattn_serving.server.thread import EngineThread


@pytest.fixture
def engine():
    return EchoEngine()


@pytest.fixture
def echo(engine, tmp_path):
    with serving(engine, tmp_path) as server:
        yield server


def health(url):
    return httpx.get(f"{url}/health", timeout=SECONDS)


def metric(url, name):
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


BAD = {
    b"": None,
    b"{": None,
    b"\xff\xfe": None,
    b"[1]": None,
    b"[" * 100_000: None,
    b'{"model": NaN}': None,
    b"9" * 5000: None,
    b"{}": "model",
    b'{"model": "other", "prompt": "a"}': "model",
    b'{"model": ["echo"], "prompt": "a"}': "model",
    b'{"model": "echo"}': "prompt",
    b'{"model": "echo", "prompt": ""}': "prompt",
    b'{"model": "echo", "prompt": []}': "prompt",
    b'{"model": "echo", "prompt": [1, "a"]}': "prompt",
    b'{"model": "echo", "prompt": [256]}': "prompt",
    b'{"model": "echo", "prompt": [-1]}': "prompt",
    b'{"model": "echo", "prompt": "\\ud800"}': "prompt",
    b'{"model": "echo", "prompt": {"a": 1}}': "prompt",
    b'{"model": "echo", "prompt": "a", "max_tokens": 0}': "max_tokens",
    b'{"model": "echo", "prompt": "a", "max_tokens": 1.5}': "max_tokens",
    b'{"model": "echo", "prompt": "a", "max_tokens": true}': "max_tokens",
    b'{"model": "echo", "prompt": "a", "max_tokens": 99999999}': "max_tokens",
    b'{"model": "echo", "prompt": "a", "temperature": -1}': "temperature",
    b'{"model": "echo", "prompt": "a", "temperature": 1e999}': "temperature",
    b'{"model": "echo", "prompt": "a", "temperature": "hot"}': "temperature",
    b'{"model": "echo", "prompt": "a", "top_p": 0}': "top_p",
    b'{"model": "echo", "prompt": "a", "top_k": -2}': "top_k",
    b'{"model": "echo", "prompt": "a", "n": 9}': "n",
    b'{"model": "echo", "prompt": "a", "n": 1e9}': "n",
    b'{"model": "echo", "prompt": "a", "seed": 1.5}': "seed",
    b'{"model": "echo", "prompt": "a", "logprobs": 6}': "logprobs",
    b'{"model": "echo", "prompt": "a", "stop": [""]}': "stop",
    b'{"model": "echo", "prompt": "a", "stop": ["1", "2", "3", "4", "5"]}': "stop",
    b'{"model": "echo", "prompt": "a", "stream": "yes"}': "stream",
    b'{"model": "echo", "prompt": "a", "stream_options": {}}': "stream_options",
    b'{"model": "echo", "prompt": "a", "logit_bias": {"5": 1}}': "logit_bias",
    b'{"model": "echo", "prompt": "a", "presence_penalty": 0.5}': "presence_penalty",
    b'{"model": "echo", "prompt": "a", "echo": 1}': "echo",
    b'{"model": "echo", "prompt": "a", "echo": true, "logprobs": 1}': "echo",
    b'{"model": "echo", "prompt": "a", "min_tokens": 17}': "min_tokens",
    b'{"model": "echo", "prompt": "a", "stop_token_ids": [256]}': "stop_token_ids",
    b'{"model": "echo", "prompt": "a", "stop_token_ids": [-1]}': "stop_token_ids",
    b'{"model": "echo", "prompt": "a", "stop_token_ids": 5}': "stop_token_ids",
    b'{"model": "echo", "prompt": "a", "temprature": 1}': "temprature",
}


def test_bad_requests_are_refused_by_the_parameters_name_and_stop_nobody(echo):
    with httpx.Client(base_url=echo.url, timeout=SECONDS) as client:
        for body, param in BAD.items():
            answer = client.post("/v1/completions", content=body)
            error = answer.json()["error"]
            assert answer.status_code in (400, 404), body
            assert error["param"] == param, body
            assert error["type"] == "invalid_request_error"
            assert error["message"]
    assert metric(echo.url, "pagedattn_requests_total") == len(BAD)
    assert ask(echo.url).json()["choices"][0]["text"] == "ab" * 8


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/completions", "/v1/models/other"])
def test_wrong_paths_and_methods_are_errors_in_the_same_form(echo, path):
    answer = httpx.get(echo.url + path)
    assert answer.status_code in (404, 405)
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_long_bodies_and_prompts_are_refused(echo):
    assert ask(echo.url, "a" * (1 << 20)).status_code == 413
    error = ask(echo.url, "a" * 30_000).json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    # What would fit before one answer: the client is told what takes the room.
    for prompt, longest in (("a" * 3000, 1), ("a", 3000)):
        error = ask(echo.url, prompt, max_tokens=longest, n=8).json()["error"]
        assert error["message"].endswith("with n=8")
    # Without a Content-Length the server counts what comes.
    chunks = (b" " * 65536 for _ in range(40))
    assert httpx.post(f"{echo.url}/v1/completions", content=chunks).status_code == 413
    assert ask(echo.url).status_code == 200


def test_clients_that_leave_half_a_request_stop_nobody(echo):
    host, port = echo.url.removeprefix("http://").split(":")
    heads = [b"", b"POST /v1/comp", b"\x00" * 99]
    heads += [b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{"]
    open_ones = [socket.create_connection((host, int(port))) for _ in range(40)]
    for index, connection in enumerate(open_ones):
        connection.sendall(heads[index % len(heads)])
    assert ask(echo.url).status_code == 200
    for connection in open_ones:
        connection.close()
    assert ask(echo.url).status_code == 200


def test_of_many_clients_at_once_each_gets_its_own_answer_or_is_told_to_come_back(echo, engine):
    def one(index):
        return index, ask(echo.url, f"<{index:03}>", max_tokens=15, stream=index % 2 == 0)

    engine.gate.clear()  # so that they pile up
    with concurrent.futures.ThreadPoolExecutor(200) as clients:
        asked = [clients.submit(one, index) for index in range(200)]
        eventually(lambda: sum(each.done() for each in asked) >= 168)
        engine.gate.set()
        answers = [each.result() for each in asked]
    assert [answer.status_code for _, answer in answers].count(200) == 32
    for index, answer in answers:
        if answer.status_code == 200:
            assert text_of(answer) == f"<{index:03}>" * 3
        else:
            assert answer.status_code == 429
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["type"] == "rate_limit_error"
    eventually(lambda: not echo.thread.tickets)
    assert not engine.completions


def text_of(answer):
    """The text of an answer, whole or in events."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json()["choices"][0]["text"]
    *events, done = answer.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return "".join(json.loads(e.removeprefix("data: "))["choices"][0]["text"] for e in events)


def test_one_who_does_not_read_holds_nobody_up_and_loses_nothing(echo, engine):
    tokens = 4000
    slow = [begin(echo.url, stream=True, max_tokens=tokens) for _ in range(5)]
    eventually(lambda: len(echo.thread.tickets) == 5)
    assert ask(echo.url).status_code == 200
    eventually(lambda: engine.idle)  # although hardly anything was read
    for connection in slow:
        answer = rest_of(connection)
        assert answer.count('"index":0') == tokens
        assert "data: [DONE]" in answer
    eventually(lambda: not echo.thread.tickets)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_a_client_that_goes_is_taken_off_the_engine(echo, engine, stream, waits):
    """Also one that was given no token yet."""
    engine.gate.clear()
    crowd = [begin(echo.url, max_tokens=5000) for _ in range(8 if waits else 0)]
    eventually(lambda: len(echo.thread.tickets) == len(crowd))
    gone = begin(echo.url, stream=stream, max_tokens=10_000)
    eventually(lambda: len(echo.thread.tickets) == len(crowd) + 1)
    last = max(echo.thread.tickets)
    gone.close()
    eventually(lambda: last not in echo.thread.tickets)
    engine.gate.set()
    eventually(lambda: last in engine.cancelled)
    for connection in crowd:
        assert '"completion_tokens":5000' in rest_of(connection)
    assert metric(echo.url, 'pagedattn_requests_total{endpoint="completions",outcome="c') == 1


class NanEngine(EchoEngine):
    """Computes NaN for the third token after a prompt of one."""

    def _tokens(self, group):
        request, count = group
        if len(request.prompt) > 1 or count < 2:
            return super()._tokens(group)
        group[1] = request.max_new_tokens
        return [Streamed(request.id, NO_TOKEN, final=True, reason="error")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_of_nan_ends_in_an_error_and_others_are_served(stream, tmp_path):
    with serving(NanEngine(), tmp_path) as server:
        answer = ask(server.url, "x", max_tokens=5, stream=stream)
        assert answer.status_code == (200 if stream else 500)
        last = answer.text.rstrip().removesuffix("[DONE]").rsplit("data: ", 1)[-1]
        assert json.loads(last)["error"]["code"] == "model_computed_nan"
        assert ask(server.url, "xy", max_tokens=5).json()["choices"][0]["text"] == "xyxyx"
        assert not server.thread.tickets


def test_when_the_engine_fails_all_are_told(echo, engine):
    engine.gate.clear()
    with concurrent.futures.ThreadPoolExecutor(20) as clients:
        asked = [clients.submit(ask, echo.url, stream=i % 2 == 0) for i in range(20)]
        eventually(lambda: len(echo.thread.tickets) == 20)
        engine.break_with = RuntimeError("the device is lost")
        engine.gate.set()
        for answer in concurrent.futures.as_completed(asked):
            assert answer.result().status_code == 500
            assert "the device is lost" in answer.result().json()["error"]["message"]
    answer = health(echo.url)
    assert answer.status_code == 503
    assert "the device is lost" in answer.json()["reason"]
    assert ask(echo.url).json()["error"]["code"] == "engine_failed"
    assert not echo.thread.tickets


def test_when_the_engine_fails_amid_an_answer_the_error_is_the_last_event(echo, engine):
    connection = begin(echo.url, stream=True, max_tokens=19_000)
    head = connection.recv(4096).decode()
    engine.break_with = MemoryError("no blocks")
    answer = head + rest_of(connection)
    assert "200 OK" in answer
    assert "DONE" not in answer
    last = answer.rstrip("\r\n0").rsplit("data: ", 1)[1].split("\n")[0]
    assert json.loads(last)["error"]["code"] == "engine_failed"


def test_a_reason_keeps_nothing_of_the_requests_that_it_refuses():
    """Their prompts would stay in the frames of its traceback."""
    thread = EngineThread(EchoEngine(), max_requests=1)
    thread.drain()
    with pytest.raises(Refusal):
        asyncio.run(thread.open([]))
    assert thread.problem is not None
    assert thread.problem.__traceback__ is None


def test_what_the_engine_refuses_is_one_requests_error(echo):
    answer = ask(echo.url, [1, 2, 3])
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "never runs")
    assert health(echo.url).status_code == 200
    assert not echo.thread.tickets


def test_an_end_lets_the_running_requests_end(echo, engine):
    engine.gate.clear()
    running = begin(echo.url, max_tokens=500)
    eventually(lambda: echo.thread.tickets)
    kept = httpx.Client(base_url=echo.url)
    assert kept.get("/health").status_code == 200
    echo.server.handle_exit(15, None)
    eventually(lambda: echo.thread.problem)
    assert echo.runner.is_alive()
    threading.Timer(0.2, engine.gate.set).start()
    assert '"completion_tokens":500' in rest_of(running)
    echo.runner.join(SECONDS)
    assert not echo.runner.is_alive()
    with pytest.raises(httpx.ConnectError):
        ask(echo.url)
    kept.close()


def test_an_end_waits_no_longer_than_it_was_told_to(engine, tmp_path):
    engine.gate.clear()
    with serving(engine, tmp_path, seconds=0.3) as server:
        running = [begin(server.url, stream=s, max_tokens=500) for s in (True, False)]
        eventually(lambda: len(server.thread.tickets) == 2)
        server.server.handle_exit(15, None)
        for connection in running:
            assert "503" in (answer := rest_of(connection))
            assert '"code":"server_stopping"' in answer


def test_a_second_signal_ends_what_runs_by_an_error(engine, tmp_path):
    engine.delay = 0.01  # so that it would run for minutes
    with serving(engine, tmp_path, seconds=SECONDS) as server:
        running = [begin(server.url, max_tokens=15_000, stream=s) for s in (False, True)]
        eventually(lambda: len(server.thread.tickets) == 2)
        server.server.handle_exit(15, None)
        eventually(lambda: server.thread.problem)
        server.server.handle_exit(15, None)
        for answer in map(rest_of, running):
            assert "server_stopping" in answer
        server.runner.join(SECONDS / 2)
        assert not server.runner.is_alive()


def test_when_the_server_has_ended_no_step_runs(engine, tmp_path):
    """A thread that is inside one when Python ends would abort the process."""
    engine.gate.clear()
    with serving(engine, tmp_path, seconds=0.1) as server:
        running = begin(server.url, max_tokens=500)
        eventually(lambda: engine.running)
        server.server.handle_exit(15, None)
        assert "server_stopping" in rest_of(running)
        threading.Timer(0.5, engine.gate.set).start()
        server.runner.join(SECONDS)
        assert not engine.running


def test_requests_during_the_end_are_sent_elsewhere(echo):
    echo.thread.drain()
    answer = ask(echo.url)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert health(echo.url).status_code == 503


def test_prompts_of_one_request_are_taken_together_or_not_at_all(echo, engine):
    engine.gate.clear()
    with begin(echo.url, max_tokens=1):
        eventually(lambda: echo.thread.tickets)
        assert ask(echo.url, ["a"] * 32).status_code == 429
        assert len(echo.thread.tickets) == 1
    engine.gate.set()
    answer = ask(echo.url, ["ab", [99, 100], "ef"], max_tokens=2, n=2).json()
    texts = [(choice["index"], choice["text"]) for choice in answer["choices"]]
    assert texts == list(enumerate(["ab", "ab"] * 1 + ["cd", "cd"] + ["ef", "ef"]))


def test_more_prompts_than_are_ever_taken_are_no_matter_of_coming_back(echo):
    answer = ask(echo.url, [[1]] * 250_000)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert ask(echo.url, ["a"] * 32).status_code == 200


def test_a_stop_string_takes_the_request_off_the_engine(echo, engine):
    answer = ask(echo.url, "one two ", max_tokens=19_000, stop=["three", "wo o"]).json()
    assert answer["choices"][0]["text"] == "one t"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 8, "completion_tokens": 9, "total_tokens": 17}
    eventually(lambda: engine.idle)
    assert engine.cancelled


@pytest.mark.parametrize("stream", [False, True])
def test_no_stop_string_ends_the_first_tokens_and_the_prompt_is_echoed(echo, stream):
    ends = {"stop": "two", "max_tokens": 30, "stream": stream}
    assert text_of(ask(echo.url, "one two ", **ends)) == "one "
    for early, text in ((6, "one "), (7, "one two one "), (30, ("one two " * 4)[:30])):
        assert text_of(ask(echo.url, "one two ", min_tokens=early, **ends)) == text
    prompts = ["a two ", [98, 32, 116, 119, 111], "é"]
    answer = ask(echo.url, prompts, n=2, echo=True, stop="two", max_tokens=6)
    choices = answer.json()["choices"]
    twice = {"a two ": "a two a ", "b two": "b twob ", "é": "ééé" + "é"}
    assert [choice["text"] for choice in choices] == [t for t in twice.values() for _ in range(2)]
    assert answer.json()["usage"]["prompt_tokens"] == 13
    assert text_of(ask(echo.url, "ab", echo=True, max_tokens=3, stream=stream)) == "ababa"


def test_the_pool_and_the_metrics_are_shown(echo, engine):
    ask(echo.url, max_tokens=7)
    pool = httpx.get(f"{echo.url}/pool").json()
    assert len(pool["owners"]) == engine.limits.num_blocks
    assert pool["steps"] == 7
    assert metric(echo.url, "pagedattn_generated_tokens_total") == 7
    assert metric(echo.url, 'pagedattn_blocks{use="free"}') == engine.limits.num_blocks
    assert metric(echo.url, "pagedattn_requests_open") == 0
    name = httpx.get(f"{echo.url}/v1/models").json()["data"][0]["id"]
    assert name == ECHO == httpx.get(f"{echo.url}/v1/models/{name}").json()["id"]
