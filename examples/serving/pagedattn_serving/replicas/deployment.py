"""Replicas of an engine on Ray Serve, the router to them, and the web server in front."""

# Ray is in no environment of the tests.
# pyright: reportMissingImports=false
import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from pathlib import Path

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.middleware import Middleware

from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.decoding.request import Request, Streamed
from pagedattn_serving.replicas.affinity import prefix_of, ranked
from pagedattn_serving.replicas.totals import Totals
from pagedattn_serving.server import refusal
from pagedattn_serving.server.app import Api, make_app
from pagedattn_serving.server.launch import load, ready_engine
from pagedattn_serving.server.refusal import Refusal
from pagedattn_serving.server.thread import EngineThread
from pagedattn_serving.server.tickets import State, Ticket

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
    """An engine in a thread of its own, as `pagedattn-serve` has one."""

    async def __init__(
        self,
        folder: str,
        limits: Limits,
        dtype: str,
        backend: str | None,
        batch_invariant: bool,
        kv_cache_dtype: str,
    ):
        loaded = load(Path(folder), dtype=dtype)
        options = backend, batch_invariant, kv_cache_dtype
        engine = await asyncio.to_thread(ready_engine, loaded, limits, *options)
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

    max_requests = MAX_REQUESTS  # at once, as of one replica: there may be no other

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
            pending = self.handle.broadcast("named_state")
            said = await pending.results_async(timeout_s=STATE_SECONDS, return_exceptions=True)
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
    *,
    name: str | None = None,
    replicas: int = 2,
    most: int | None = None,
    dtype: str = "float32",
    backend: str | None = None,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
    middleware: Sequence[Middleware] = (),
    **resources,
) -> serve.Application:
    """The web server in front of the replicas; `resources` are Ray's, of each replica."""

    def web() -> Starlette:
        served = load(folder, name, dtype).served(limits)
        return make_app(Api(served, Replicas()), middleware=middleware)

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
            request_router_class=PrefixRouter  # pyright: ignore[reportArgumentType]  (or its path)
        ),
        ray_actor_options=resources,
    ).bind(str(folder.resolve()), limits, dtype, backend, batch_invariant, kv_cache_dtype)
    front = serve.deployment(
        serve.ingress(web)(),
        name="Web",
        max_ongoing_requests=1000,
        ray_actor_options={"num_cpus": 0},  # else two replicas leave it no core of two
    )
    return front.bind(model)
