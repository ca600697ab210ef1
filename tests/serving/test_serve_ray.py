"""Replicas on Ray Serve: prompts that begin alike go to one of them, and one of them dies."""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from http_server import SECONDS, check_a_stream_outlives_sigterm, eventually
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_serving.replicas.affinity import IMBALANCE, PREFIX, prefix_of, ranked
from pagedattn_serving.replicas.totals import Totals
from pagedattn_serving.server.guards import guards
from pagedattn_serving.server.tickets import State
from tiny import ROOMY, saved_tiny

KEY, ORIGIN = "sk-1", "https://page.example"
HEADERS = {"Authorization": f"Bearer {KEY}", "Origin": ORIGIN}
MARK = f"test_serve_ray of {os.getpid()}"
LIMIT = 240  # seconds of a test, on a busy machine
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


STATES = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(
        State,
        problem=st.sampled_from([None, "broken"]),
        owners=st.lists(st.integers(-2, 3), max_size=3),
        gauges=st.fixed_dictionaries({"requests_running": st.integers(0, 9)}),
        counters=st.fixed_dictionaries({"steps": st.integers(0, 9)}),
    ),
)


@given(st.lists(STATES, max_size=5))
def test_metrics_are_sums_over_all_replicas_and_counters_never_fall(rounds):
    totals, steps, before = Totals(), collections.Counter(), 0
    for states in rounds:
        for name, state in states.items():
            steps[name] += state.counters["steps"]
        now = {name: replace(s, counters={"steps": steps[name]}) for name, s in states.items()}
        total = totals.of(now)
        running = [state.gauges["requests_running"] for state in states.values()]
        assert total.gauges.get("requests_running", 0) == sum(running)
        assert total.gauges["replicas"] == len(states)
        assert total.counters.get("steps", 0) == sum(steps.values()) >= before
        assert len(total.owners) == sum(len(state.owners) for state in states.values())
        assert (total.problem is None) == any(s.problem is None for s in states.values())
        before = sum(steps.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model of bytes; skips the tests where Ray is missing."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install './examples/serving[ray]'")
    pytest.importorskip("ray.serve")
    return saved_tiny(tmp_path_factory.mktemp("ray") / "tiny")


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


@pytest.fixture(scope="module")
def cluster(folder):
    """Two replicas of a tiny model behind a port; Ray's own processes and loggers warn a lot."""
    import ray

    port = free_port()
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the replicas
    from pagedattn_serving.replicas import deployment
    from ray import serve as of_ray

    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        of_ray.start(http_options={"host": "127.0.0.1", "port": port})
        limits, middleware = replace(ROOMY, num_blocks=80), guards(KEY, (ORIGIN,))
        app = deployment.application(folder, limits, middleware=middleware, num_cpus=0.5)
        of_ray.run(app, name=deployment.APP, route_prefix="/")
        handle = of_ray.get_deployment_handle(deployment.REPLICA, deployment.APP)
        yield f"http://127.0.0.1:{port}", handle
    finally:
        of_ray.shutdown()
        ray.shutdown()
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def ask(url, prompt, **body):
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, **body}
    return httpx.post(
        f"{url}/v1/completions", json=body, headers=HEADERS, timeout=300, verify=False
    )


def metric(url, name):
    lines = httpx.get(f"{url}/metrics", headers=HEADERS, timeout=60).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"pagedattn_{name} "))


def steps(handle, prompt):
    """How many steps the replica has made that such a prompt is sent to, and its prefix hits."""
    counters = handle.state.remote(tuple(prompt.encode())).result().counters
    return counters["steps"], counters["prefix_hit_tokens"]


@pytest.mark.filterwarnings("ignore")
def test_prompts_that_begin_alike_hit_one_cache_and_none_is_lost_when_a_replica_dies(cluster):
    url, handle = cluster
    prompt = "abcdefgh" * 4
    texts = {ask(url, prompt, max_tokens=6).json()["choices"][0]["text"] for _ in range(4)}
    assert len(texts) == 1
    made, hits = steps(handle, prompt)
    assert hits >= 3 * 28
    others = (chr(ord("A") + i) for i in range(40))
    assert any(steps(handle, other)[0] == made for other in others)
    idle = next(other for other in map(chr, range(65, 105)) if steps(handle, other)[0] == 0)
    assert ask(url, idle, max_tokens=3).status_code == 200
    assert metric(url, "steps_total") == made + steps(handle, idle)[0] > made
    assert ask(url, "x", logit_bias={"1": 1}).json()["error"]["param"] == "logit_bias"
    assert httpx.get(f"{url}/health").status_code == 200
    assert metric(url, "replicas") == 2
    check_guards(url)
    one_dies_under_load(url)


def check_guards(url):
    """Who has no key is refused; who has one may ask from the page that was named."""
    assert httpx.get(f"{url}/v1/models").status_code == 401
    answer = ask(url, "x", max_tokens=1)
    assert answer.headers["access-control-allow-origin"] == ORIGIN


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


@pytest.fixture
def command(folder):
    """The command with one replica or two: its url, and its process, marked with all it starts."""
    port = free_port()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OF_A_TEST": MARK}
    options = [f"--port={port}", "--replicas=1", "--most=2", "--max-seqs=2"]
    options += [f"--api-key={KEY}", f"--allowed-origin={ORIGIN}"]
    with subprocess.Popen(
        [sys.executable, "-m", "pagedattn_serving.replicas.command", str(folder), *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        killer = threading.Timer(LIMIT, process.kill)
        killer.start()
        try:
            said = list(
                itertools.takewhile(lambda line: "is served at" not in line, process.stdout)
            )
            assert process.poll() is None, said
            yield f"http://127.0.0.1:{port}", process
        finally:
            killer.cancel()
            process.kill()


def marked():
    """The processes that have the mark in their environment, with what they run."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if MARK.encode() in (path / "environ").read_bytes():
                found[path.name] = (path / "cmdline").read_text()[:80]
    return found


def test_under_load_a_replica_comes_and_upon_sigterm_all_end_in_order(command):
    """What runs is answered; then the port is closed, and nothing stays behind."""
    url, process = command
    assert metric(url, "replicas") == 1
    with concurrent.futures.ThreadPoolExecutor(24) as clients:
        asked = [clients.submit(answered_for, url, 20, str(index)) for index in range(24)]
        eventually(lambda: metric(url, "replicas") == 2, LIMIT)
        assert all(each.result(timeout=LIMIT) for each in asked)
    check_guards(url)
    check_a_stream_outlives_sigterm(url, "tiny", process, HEADERS)
    said, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, said
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    eventually(lambda: not marked())


def answered_for(url, seconds, prompt):
    """Whether every answer to a prompt was whole, in so many seconds."""
    end, whole = time.monotonic() + seconds, True
    while time.monotonic() < end:
        whole &= outcome(ask(url, prompt, max_tokens=60)) == "whole"
    return whole
