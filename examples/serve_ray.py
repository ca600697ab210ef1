"""Serves a checkpoint by several replicas, with Ray Serve: `pip install 'pagedattn[serve,ray]'`.

    python examples/serve_ray.py DIR --replicas 2
    python examples/serve_ray.py DIR --replicas 1 --most 8 --gpus 1

The application is that of `serve.py`. Prompts that begin alike go to the same replica, which has
their beginning cached, unless it has much more to do than another. With `--most` the number of
replicas follows the load.
"""

# Ray is in no environment of the tests.
# pyright: reportMissingImports=false
import argparse
import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from serving.checkpoint import CONFIG, read_config
from serving.limits import Limits
from serving.request import Request, Streamed
from serving.server import refusal
from serving.server.affinity import prefix_of, ranked
from serving.server.app import Api, make_app
from serving.server.arguments import limits_of, make_parser
from serving.server.launch import load, ready_engine
from serving.server.refusal import Refusal
from serving.server.text import load_text
from serving.server.thread import EngineThread
from serving.server.tickets import State, Ticket
from serving.server.totals import Totals
from starlette.applications import Starlette

APP, REPLICA = "pagedattn", "Replica"
MAX_REQUESTS = 64  # of a replica
STATE_SECONDS = 5.0  # for the replicas to say how they are
LOAD_SECONDS = 5.0  # of too much load, until another replica starts


class PrefixRouter(RequestRouter):
    """Ranks the replicas by `affinity.ranked`; the first that has room takes the request."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        replicas = {r.replica_id.unique_id: r for r in candidate_replicas}
        prompt = pending_request.args[0] if pending_request and pending_request.args else ()
        prompt = prompt.prompt if isinstance(prompt, Request) else prompt
        known = self.replica_queue_len_cache
        loads = {name: known.get(r.replica_id) or 0 for name, r in replicas.items()}
        return [[replicas[name]] for name in ranked(prefix_of(prompt), loads)]


class Replica:
    """An engine in a thread of its own, as in `serve.py`."""

    async def __init__(self, folder: str, limits: Limits, dtype: str):
        loaded = load(Path(folder), dtype=dtype)
        engine = await asyncio.to_thread(ready_engine, loaded, limits)
        self.thread = EngineThread(engine, MAX_REQUESTS)
        self.thread.start()

    async def generate(self, request: Request) -> AsyncIterator[list[Streamed]]:
        """The request's tokens, all that have come since the last time together."""
        [ticket] = await self.thread.open([request])
        come = []
        try:
            async for token in ticket.tokens():
                come.append(token)
                if ticket.queue.empty():
                    yield come
                    come = []
        finally:
            ticket.close()

    async def state(self, prompt: Sequence[int] = ()) -> State:
        """How the replica is that such a prompt is sent to."""
        del prompt
        return await self.thread.state()

    async def named_state(self) -> tuple[str, State]:
        return serve.get_replica_context().replica_id.unique_id, await self.thread.state()

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        if self.thread.problem:
            raise self.thread.problem


class RemoteTicket:
    """A request that a replica has; if the replica dies, its reader gets an error."""

    def __init__(self, response):
        self.response = response

    async def tokens(self) -> AsyncGenerator[Streamed, None]:
        try:
            async for tokens in self.response:
                for token in tokens:
                    yield token
        except (RayError, RayServeException) as error:
            raise refused(error) from error

    def close(self) -> None:
        self.response.cancel()


class Replicas:
    """What the web server asks, asked of the replicas."""

    def __init__(self):
        self.handle = serve.get_deployment_handle(REPLICA, APP)
        self.totals = Totals()

    async def open(self, requests: Sequence[Request]) -> list[Ticket]:
        """Which replica takes a request, and whether, its ticket tells."""
        generate = self.handle.options(stream=True).generate
        return [RemoteTicket(generate.remote(request)) for request in requests]

    async def state(self) -> State:
        """That of all replicas together; one that does not answer is left out."""
        try:
            asked = self.handle.broadcast("named_state")
            said = await asked.results_async(timeout_s=STATE_SECONDS, return_exceptions=True)
        except (TimeoutError, RayError, RayServeException) as error:
            return State(problem=f"no replica answers: {type(error).__name__}")
        return self.totals.of(dict(each for each in said if not isinstance(each, BaseException)))


def refused(error: Exception) -> Refusal:
    """Why a replica did not finish a request: what it says, or that it is full or gone."""
    cause = getattr(error, "cause", None)  # what the replica raised
    if isinstance(cause, Refusal):
        return cause
    if isinstance(error, BackPressureError):
        return Refusal(429, "all replicas are busy", code=refusal.BUSY, retry_after=1)
    text = f"the replica that had the request failed: {type(error).__name__}"
    return Refusal(503, text, code="replica_failed", retry_after=1)


def application(
    folder: Path,
    limits: Limits,
    replicas: int = 2,
    most: int | None = None,
    dtype: str = "float32",
    **resources,
) -> serve.Application:
    """The web server in front of the replicas; `resources` are Ray's, of each replica."""
    name = folder.resolve().name

    def web() -> Starlette:
        served = load(folder, name, dtype).served(limits)
        return make_app(Api(served, Replicas()))

    scaled = AutoscalingConfig(
        min_replicas=replicas,
        max_replicas=most or replicas,
        target_ongoing_requests=limits.max_seqs,
        upscale_delay_s=LOAD_SECONDS,
        look_back_period_s=LOAD_SECONDS,
        metrics_interval_s=LOAD_SECONDS / 5,
    )
    model = serve.deployment(
        Replica,
        name=REPLICA,
        autoscaling_config=scaled,
        max_ongoing_requests=MAX_REQUESTS,
        max_queued_requests=MAX_REQUESTS,
        health_check_period_s=2,
        graceful_shutdown_timeout_s=30,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter  # pyright: ignore[reportArgumentType]
        ),
        ray_actor_options=resources,
    ).bind(str(folder.resolve()), limits, dtype)
    front = serve.deployment(
        serve.ingress(web)(),
        name="Web",
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},  # else two replicas leave it no core of two
    )
    return front.bind(model)


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2, help="the fewest")
    parser.add_argument("--most", type=int, help="default: as many as the fewest")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        limits = checked(args)  # no tensors yet: Ray forks, which JAX's threads may not survive
    except (ValueError, OSError) as error:
        sys.exit(f"serve_ray.py: {error}")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the replicas
    serve.start(http_options=HTTPOptions(host="127.0.0.1", port=args.port))
    counts = {"replicas": args.replicas, "most": args.most}
    app = application(args.model, limits, **counts, dtype=args.dtype, num_gpus=args.gpus)
    serve.run(app, name=APP, route_prefix="/")
    print(f"{args.model.resolve().name} is served at http://127.0.0.1:{args.port}", flush=True)
    wait_for_a_signal()
    serve.delete(APP)  # nothing new is taken, and what runs ends; shutdown would cut it off
    serve.shutdown()
    ray.shutdown()


def wait_for_a_signal() -> None:
    """Until here Ray's own handlers end the process; they would not wait for what runs."""
    asked = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: asked.set())
    asked.wait()


def checked(args: argparse.Namespace) -> Limits:
    """Raises ValueError for a folder without a known model or its tokenizer, and for its limits."""
    model = read_config(args.model / CONFIG)
    load_text(args.model, model.vocab_size)
    return limits_of(args, model)


if __name__ == "__main__":
    main()
