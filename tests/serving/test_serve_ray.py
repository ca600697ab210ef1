"""Replicas on Ray Serve: prompts that begin alike go to one of them, and one of them dies."""

import collections
import concurrent.futures
import json
import os
import socket
import sys
from dataclasses import replace

import httpx
import jax
import pytest
from http_server import SECONDS, eventually
from hypothesis import given
from hypothesis import strategies as st
from serving.checkpoint import save_checkpoint
from serving.initial import init_params
from serving.server.affinity import IMBALANCE, PREFIX, prefix_of, ranked
from tiny import ROOMY, TINY

LOADS = st.dictionaries(st.text("abc", min_size=1), st.integers(0, 30), min_size=1, max_size=6)


@given(st.binary(max_size=9), LOADS)
def test_every_replica_is_ranked_and_overloaded_ones_come_last(prefix, loads):
    order = ranked(prefix, loads)
    assert sorted(order) == sorted(loads)
    overloaded = [loads[name] - min(loads.values()) > IMBALANCE for name in order]
    assert overloaded == sorted(overloaded)


@given(st.binary(max_size=9), LOADS)
def test_a_prefix_stays_where_it_was_when_another_replica_goes(prefix, loads):
    loads = dict.fromkeys(loads, 0)
    first, *others = ranked(prefix, loads)
    for gone in others:
        assert ranked(prefix, {n: 0 for n in loads if n != gone})[0] == first


def test_prefixes_are_spread():
    loads = dict.fromkeys(["one", "two", "three"], 0)
    first = collections.Counter(ranked(prefix_of([i]), loads)[0] for i in range(300))
    assert min(first.values()) > 60
    long = list(range(PREFIX))
    assert prefix_of([*long, 1]) == prefix_of([*long, 2]) != prefix_of([0, *long])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Two replicas of a tiny model behind a port; Ray's own processes and loggers warn a lot."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagedattn[ray]'")
    pytest.importorskip("ray.serve")
    folder, model = tmp_path_factory.mktemp("ray") / "tiny", replace(TINY, vocab_size=256)
    with jax.ensure_compile_time_eval():
        save_checkpoint(folder, model, init_params(model, jax.random.key(0)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the replicas
    import serve_ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        options = serve_ray.HTTPOptions(host="127.0.0.1", port=port)
        serve_ray.serve.start(http_options=options)
        app = serve_ray.application(folder, replace(ROOMY, num_blocks=80), replicas=2, num_cpus=0.5)
        serve_ray.serve.run(app, name=serve_ray.APP, route_prefix="/")
        yield f"http://127.0.0.1:{port}", serve_ray
    finally:
        serve_ray.serve.shutdown()
        ray.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def ask(url, prompt, **body):
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, **body}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300, verify=False)


def steps(serve_ray, prompt):
    """How many steps the replica has made that such a prompt is sent to, and its prefix hits."""
    handle = serve_ray.serve.get_deployment_handle(serve_ray.REPLICA, serve_ray.APP)
    counters = handle.state.remote(tuple(prompt.encode())).result().counters
    return counters["steps"], counters["prefix_hit_tokens"]


@pytest.mark.filterwarnings("ignore")
def test_prompts_that_begin_alike_hit_one_cache_and_none_is_lost_when_a_replica_dies(cluster):
    url, serve_ray = cluster
    prompt = "abcdefgh" * 4
    texts = {ask(url, prompt, max_tokens=6).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 1
    made, hits = steps(serve_ray, prompt)
    assert hits >= 3 * 28
    others = (chr(ord("A") + i) for i in range(40))
    assert any(steps(serve_ray, other)[0] == made for other in others)
    assert any(steps(serve_ray, chr(ord("A") + i))[0] == 0 for i in range(40))
    assert ask(url, "x", logit_bias={"1": 1}).json()["error"]["param"] == "logit_bias"
    assert httpx.get(f"{url}/health").status_code == 200
    one_dies_under_load(url)


def one_dies_under_load(url):
    """Every request is answered, whole or by an error; those that come after it are served."""
    import ray

    def one(index):
        body = {"max_tokens": 30, "stream": index % 2 == 0}
        return index, ask(url, f"{index:02}", **body)

    names = ray.util.list_named_actors(all_namespaces=True)
    name = next(each for each in names if "#Replica#" in each["name"])
    victim = ray.get_actor(name["name"], name["namespace"])
    with concurrent.futures.ThreadPoolExecutor(40) as clients:
        asked = [clients.submit(one, index) for index in range(40)]
        eventually(lambda: sum(each.done() for each in asked) >= 2)
        ray.kill(victim, no_restart=True)
        answers = [each.result(timeout=3 * SECONDS) for each in asked]
    outcomes = collections.Counter(outcome(answer) for _, answer in answers)
    assert outcomes["whole"] + outcomes["replica_failed"] == 40, outcomes
    assert outcomes["whole"] >= 2
    assert outcomes["replica_failed"]  # else it died too late to show anything
    assert ask(url, "after").status_code == 200


def outcome(answer):
    """ "whole", or the code of the error; anything else is a lost request."""
    if answer.status_code != 200:
        return answer.json()["error"]["code"]
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return "whole" if answer.json()["usage"]["completion_tokens"] else "empty"
    *events, last = answer.text.removesuffix("\n\n").split("\n\n")
    if last == "data: [DONE]":
        return "whole" if events else "empty"
    return json.loads(last.removeprefix("data: "))["error"]["code"]
