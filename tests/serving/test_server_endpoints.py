"""What is there besides completions: versions, pings, tokens, and a list for who is lost."""

import httpx
import pytest
from http_server import ECHO, EchoEngine, serving
from pagedattn_serving.server.refusal import failed

import pagedattn

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.fixture
def server(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    with serving(EchoEngine(), tmp_path) as server:
        yield server


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_the_version_is_the_librarys(client):
    assert client.get("/version").json() == {"version": pagedattn.__version__}


def test_pings_are_answered_while_requests_are(server, client):
    assert [client.request(m, "/ping").status_code for m in ("GET", "POST")] == [200, 200]
    server.thread.problem = failed("lost")
    assert [client.request(m, "/ping").status_code for m in ("GET", "POST")] == [503, 503]


def test_tokens_are_those_that_a_completion_counts(server, client):
    for prompt in ("é b", "a", ""):
        told = client.post("/tokenize", json={"prompt": prompt}).json()
        assert told["tokens"] == list(prompt.encode())
        assert told["count"] == len(prompt.encode())
        assert told["max_model_len"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert told["token_strs"] is None
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": ECHO, "messages": messages}
    told = client.post("/tokenize", json=body | {"return_token_strs": True}).json()
    assert "".join(told["token_strs"]) == "user:hi;"
    usage = client.post("/v1/chat/completions", json=body | {"max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens"] == told["count"]
    assert not server.thread.tickets


@pytest.mark.parametrize(
    ("body", "param", "status"),
    [
        ({"model": ECHO}, "prompt", 400),
        (
            {"model": ECHO, "prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "prompt",
            400,
        ),
        ({"model": ECHO, "prompt": [1]}, "prompt", 400),
        ({"model": ECHO, "prompt": "a", "max_tokens": 5}, "max_tokens", 400),
        ({"model": "other", "prompt": "a"}, "model", 404),
    ],
)
def test_wrong_requests_for_tokens_are_refused(client, body, param, status):
    answer = client.post("/tokenize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_who_is_lost_is_told_what_there_is(client):
    answer = client.get("/v1/embeddings")
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    for route in ("POST /v1/completions", "GET /v1/models", "POST /tokenize", "GET/POST /ping"):
        assert route in message
    answer = client.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["error"]["message"].endswith("there is POST /v1/completions")
    assert ECHO in client.get("/v1/models/other").json()["error"]["message"]
