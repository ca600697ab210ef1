"""Keys and origins: who may ask, and that nobody else learns anything."""

import httpx
import openai
import pytest
from http_server import ECHO, EchoEngine, ask, serving
from pagedattn_serving.server.guards import guards

KEY, PAGE = "sk-1234", "https://page.example"
GUARDED = ("/v1/models", "/v1/completions", "/v1/nothing", "/tokenize", "/pool", "/metrics")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    with serving(EchoEngine(), folder, middleware=guards(KEY, (PAGE,))) as server:
        yield server.url


def test_openais_client_is_served_with_the_key_and_told_without(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        options = {"model": ECHO, "prompt": "ab", "max_tokens": 3}
        assert client.completions.create(**options).choices[0].text == "aba"
        streamed = client.completions.create(**options, stream=True)
        assert "".join(chunk.choices[0].text for chunk in streamed) == "aba"
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="sk-1235", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as refused,
    ):
        client.models.list()
    assert refused.value.code == "invalid_api_key"


WRONG = ["", KEY, "Bearer", f"Digest {KEY}", f"Bearer {KEY}5", f"Bearer {KEY[:-1]}"]


@pytest.mark.parametrize("path", GUARDED)
def test_nothing_is_told_without_the_key(url, path):
    for header in [*WRONG, "Bearer \xe9", f"Bearer {KEY.upper()}"]:
        answer = httpx.get(url + path, headers={"Authorization": header.encode("latin-1")})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert KEY not in answer.text
    answer = httpx.get(url + path, headers={"Authorization": f"bearer  {KEY}"})
    assert answer.status_code in (200, 404, 405)


def test_the_page_and_pings_need_no_key(url):
    assert [httpx.get(url + path).status_code for path in ("/", "/health", "/ping")] == [200] * 3


def preflight(url, origin):
    asked = {"Access-Control-Request-Method": "POST"}
    asked |= {"Access-Control-Request-Headers": "authorization, content-type, x-stainless-os"}
    return httpx.options(f"{url}/v1/completions", headers={"Origin": origin, **asked})


def test_pages_of_an_allowed_origin_may_ask_and_no_others(url):
    allowed = preflight(url, PAGE)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    for headers in ({"Authorization": f"Bearer {KEY}"}, {}):  # a page is told of its missing key
        answer = httpx.get(f"{url}/v1/models", headers={"Origin": PAGE, **headers})
        assert answer.headers["access-control-allow-origin"] == PAGE
    other = "https://other.example"
    assert "access-control-allow-origin" not in preflight(url, other).headers
    answer = httpx.get(f"{url}/health", headers={"Origin": other})
    assert "access-control-allow-origin" not in answer.headers


def test_without_flags_all_may_ask_and_no_page_may(tmp_path):
    with serving(EchoEngine(), tmp_path, middleware=guards(None, ())) as server:
        assert ask(server.url).status_code == 200
        assert "access-control-allow-origin" not in preflight(server.url, PAGE).headers
    with serving(EchoEngine(), tmp_path, middleware=guards(None, ("*",))) as server:
        assert preflight(server.url, PAGE).headers["access-control-allow-origin"] == "*"
