"""A server on a free port of this process, and an engine that repeats its prompts."""

import contextlib
import json
import signal
import socket
import threading
import time
from types import SimpleNamespace

import httpx
import numpy as np
import uvicorn
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.decoding.request import Streamed
from pagedattn_serving.engine.engine import Step
from pagedattn_serving.server.generation import Served
from pagedattn_serving.server.launch import Server, local_app
from pagedattn_serving.server.text import NUM_BYTES, load_text
from pagedattn_serving.server.thread import EngineThread

ECHO = "echo"
SECONDS = 120  # after which a test fails rather than hangs; much, for a busy machine


class EchoEngine:
    """Answers with the prompt, again and again.

    `gate` holds its steps, `delay` makes them longer, `break_with` ends them; `running` is true
    while one runs.
    """

    def __init__(self, max_seqs=8, max_seq_len=20_000):
        self.limits = Limits(max_seq_len // 16, 16, max_seq_len, max_seqs)
        self.scheduler = SimpleNamespace(running=[], waiting=[], num_preemptions=0)
        self.prefixes, self.completions = SimpleNamespace(num_hit_tokens=0), {}
        self.cancelled, self.break_with, self.gate = [], None, threading.Event()
        self.gate.set()
        self.delay, self.running = 0.0, False

    @property
    def idle(self):
        return not (self.scheduler.running or self.scheduler.waiting)

    def submit(self, request):
        if request.prompt == (1, 2, 3):
            raise ValueError("never runs")
        self.scheduler.waiting.append([request, 0])

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        for groups in (self.scheduler.running, self.scheduler.waiting):
            groups[:] = [group for group in groups if group[0].id != request_id]
        return True

    def holdings(self):
        owners = self.owners()
        return SimpleNamespace(owners=lambda: owners)

    def owners(self):
        return np.full(self.limits.num_blocks, -1)

    def step(self):
        self.running = True
        try:
            return self._step()
        finally:
            self.running = False

    def _step(self):
        self.gate.wait(SECONDS)
        time.sleep(self.delay)
        if self.break_with:
            raise self.break_with
        running, waiting = self.scheduler.running, self.scheduler.waiting
        while waiting and len(running) < self.limits.max_seqs:
            running.append(waiting.pop(0))
        tokens = [token for group in running for token in self._tokens(group)]
        for group in running:
            group[1] += 1
        running[:] = [group for group in running if group[1] < group[0].max_new_tokens]
        return Step(tokens, self.holdings())

    def _tokens(self, group):
        request, count = group
        final = count + 1 == request.max_new_tokens
        if final:
            self.completions[request.id] = []
        for sample in range(request.decoding.width):
            token, reason = request.prompt[count % len(request.prompt)], "length" if final else None
            yield Streamed(request.id, token, sample, final, reason)


@contextlib.contextmanager
def serving(
    engine,
    directory,
    max_requests=32,
    seconds=5.0,
    vocab_size=NUM_BYTES,
    windows=(),
    middleware=(),
):
    """The server of an engine; `url`, `thread` and `server` of it. Ends it in the end."""
    thread = EngineThread(engine, max_requests)
    served = Served(ECHO, load_text(directory, vocab_size), vocab_size, engine.limits, windows)
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # what is not read waits here
    app = local_app(served, thread, max_body=1 << 20, middleware=middleware)
    config = uvicorn.Config(app, log_level="error")
    server = Server(config, thread, seconds)
    runner = threading.Thread(target=server.run, args=([listener],))
    runner.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        eventually(lambda: server.started)
        yield SimpleNamespace(url=url, thread=thread, server=server, runner=runner)
    finally:
        if isinstance(engine, EchoEngine):
            engine.gate.set()
        server.should_exit = True
        runner.join(SECONDS)
        assert not runner.is_alive()


def eventually(holds, seconds=SECONDS):
    """Waits for it."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.01)


def ask(url, prompt="ab", **body):
    """The answer to a completion."""
    body = {"model": ECHO, "prompt": prompt, **body}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=SECONDS, verify=False)


def check_a_stream_outlives_sigterm(url, model, process, headers=None):
    """The process that serves is told to end amid it."""
    body = {"model": model, "prompt": "a", "max_tokens": 60, "stream": True}
    options = {"json": body, "headers": headers, "timeout": 2 * SECONDS}
    with httpx.stream("POST", f"{url}/v1/completions", **options) as answer:
        events = answer.iter_lines()
        first = next(events)
        process.send_signal(signal.SIGTERM)
        rest = list(events)
    assert "error" not in first + "".join(rest)
    assert rest[-2] == "data: [DONE]"


def begin(url, **body):
    """A connection on which a completion was asked for, and nothing was read yet."""
    host, port = url.removeprefix("http://").split(":")
    text = json.dumps({"model": ECHO, "prompt": "ab", **body})
    connection = socket.create_connection((host, int(port)), SECONDS)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(text)}\r\n"
    connection.sendall(f"{head}Connection: close\r\n\r\n{text}".encode())
    return connection


def rest_of(connection):
    """All that comes on a connection."""
    parts = []
    while part := connection.recv(1 << 16):
        parts.append(part)
    connection.close()
    return b"".join(parts).decode()
