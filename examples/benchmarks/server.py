"""Measures what the server's own Python costs: processor time for each streamed token and
ranked replica.

    PYTHONPATH=examples python -m benchmarks.server [-o docs/results]

An engine that costs nothing answers over a real socket in another process, which tells the
processor time that it took. So a busy machine changes the figures little.
"""

import argparse
import asyncio
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import uvicorn
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.decoding.request import Streamed
from pagedattn_serving.engine.engine import Step
from pagedattn_serving.engine.owners import Holdings
from pagedattn_serving.replicas.affinity import prefix_of, ranked
from pagedattn_serving.server.generation import Served
from pagedattn_serving.server.launch import local_app
from pagedattn_serving.server.text import NUM_BYTES, load_text
from pagedattn_serving.server.thread import EngineThread

from benchmarks.machine import versions

CLIENTS, TOKENS = 64, 200
REPLICAS, PROMPTS = 800, 64
PACKAGES = ("numpy", "starlette", "uvicorn")


class FreeEngine:
    """Gives every request the token that spells "a", all in each step."""

    def __init__(self):
        self.limits = Limits(num_blocks=4096, max_seq_len=4096, max_seqs=64)
        self.scheduler = SimpleNamespace(running=[], waiting=(), num_preemptions=0)
        self.prefixes, self.completions = SimpleNamespace(num_hit_tokens=0), {}

    @property
    def idle(self) -> bool:
        return not self.scheduler.running

    def submit(self, request) -> None:
        self.scheduler.running.append([request, 0])

    def cancel(self, request_id: int) -> None:
        del request_id

    def holdings(self) -> Holdings:
        zeros = np.zeros(self.limits.num_blocks, np.int32)
        return Holdings(zeros, zeros[None, None], self.limits.block_size, [])

    def step(self) -> Step:
        time.sleep(0.005)  # as a device would take, so that steps hold tokens of many requests
        tokens = []
        for group in self.scheduler.running:
            group[1] += 1
            final = group[1] == group[0].max_new_tokens
            tokens.append(Streamed(group[0].id, 97, 0, final, "length" if final else None))
        self.scheduler.running = [g for g in self.scheduler.running if g[1] < g[0].max_new_tokens]
        return Step(tokens, self.holdings())


def serve() -> None:
    """Serves until standard input says so, then prints the seconds of processor time it took."""
    engine = FreeEngine()
    thread = EngineThread(engine, CLIENTS)  # pyright: ignore[reportArgumentType]  (it is like one)
    text = load_text(Path(tempfile.gettempdir(), "no-such-model"), NUM_BYTES)
    app = local_app(Served("free", text, NUM_BYTES, engine.limits), thread)
    listener = socket.create_server(("127.0.0.1", 0), backlog=CLIENTS)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))

    async def measured() -> None:
        serving = asyncio.create_task(server.serve([listener]))
        print(listener.getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        start = time.process_time()
        await asyncio.to_thread(sys.stdin.readline)
        print(time.process_time() - start, flush=True)
        server.should_exit = True
        await serving

    asyncio.run(measured())


async def one(port: int) -> int:
    """The bytes that a streamed answer has."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"model": "free", "prompt": "a", "max_tokens": TOKENS, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}Connection: close\r\n\r\n{body}".encode())
    answer = await reader.read()
    while part := await reader.read(1 << 16):
        answer += part
    writer.close()
    if b"[DONE]" not in answer:
        raise RuntimeError(f"an answer is not whole: {answer[-300:]}")
    return len(answer)


async def clients(port: int) -> int:
    return sum(await asyncio.gather(*(one(port) for _ in range(CLIENTS))))


def streaming() -> dict[str, float]:
    """Microseconds of the server's processor time for each streamed token, and bytes of it."""
    command = [sys.executable, "-m", "benchmarks.server", "--serve"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe) as server:
        if not (server.stdin and server.stdout):
            raise RuntimeError("the server's pipes are missing")
        port = int(server.stdout.readline())
        asyncio.run(clients(port))  # once to warm up
        server.stdin.write("\n")
        server.stdin.flush()
        total = asyncio.run(clients(port))
        server.stdin.write("\n")
        server.stdin.flush()
        seconds = float(server.stdout.readline())
    tokens = CLIENTS * TOKENS
    return {"us_a_streamed_token": 1e6 * seconds / tokens, "bytes_a_streamed_token": total / tokens}


def ranking() -> dict[str, float]:
    """Microseconds to rank the replicas for a prompt, for each replica."""
    loads = {f"replica-{index}": index % 3 for index in range(REPLICAS)}
    start = time.process_time()
    for index in range(PROMPTS):
        ranked(prefix_of([index]), loads)
    return {"us_a_ranked_replica": 1e6 * (time.process_time() - start) / PROMPTS / REPLICAS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--out", type=Path, help="write server.json into this folder")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = {"cores": os.cpu_count(), "date": date, "versions": versions(PACKAGES)}
    machine = {"device": "cpu"} | about
    sizes = {"clients": CLIENTS, "tokens_a_client": TOKENS, "replicas": REPLICAS}
    figures = {"machine": machine, "sizes": sizes, **streaming(), **ranking()}
    text = json.dumps(figures, indent=1)
    print(text)
    if args.out:
        (args.out / "server.json").write_text(text + "\n")
    return None


if __name__ == "__main__":
    main()
