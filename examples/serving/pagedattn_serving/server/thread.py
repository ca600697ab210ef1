"""The engine in a thread of its own, with a bounded number of requests in it.

The event loop hands over requests and cancellations by a queue, and gets a step's tokens by one
call. Tokens wait in the ticket of their request, so a slow reader holds nobody up. Should the
engine fail, every ticket gets the reason, and no further request is taken.
"""

import asyncio
import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from pagedattn_serving.decoding.request import Request, Streamed
from pagedattn_serving.engine.engine import Engine, Step
from pagedattn_serving.server import refusal
from pagedattn_serving.server.refusal import Refusal
from pagedattn_serving.server.tickets import QueueTicket, State

Command = Callable[[], None]


class EngineThread:
    """Runs an engine; `open` and `state` belong to the event loop in which `start` was called."""

    def __init__(self, engine: Engine, max_requests: int):
        self.engine, self.max_requests = engine, max_requests
        self.tickets: dict[int, QueueTicket] = {}
        self.problem: Refusal | None = None  # why no request is taken
        self.num_steps = 0
        self._ids = itertools.count()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._seen = self._look()

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def open(self, requests: Sequence[Request]) -> list[QueueTicket]:
        if self.problem:
            raise replace(self.problem)  # an exception that is raised again keeps all its frames
        if len(self.tickets) + len(requests) > self.max_requests:
            raise refusal.busy(self.max_requests)
        return [self._submit(replace(request, id=next(self._ids))) for request in requests]

    async def state(self) -> State:
        seen = self._seen()
        gauges = {**seen.gauges, "requests_open": len(self.tickets)}
        problem = self.problem.message if self.problem else None
        return replace(seen, gauges=gauges, problem=problem)

    def drain(self) -> None:
        """Takes no further request; those that it has taken go on."""
        self.problem = self.problem or refusal.draining()

    def stop(self, reason: Refusal | None = None) -> None:
        """Ends the thread after its step; requests that are not finished get the reason."""
        self._fail(reason or refusal.draining())
        self._commands.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the thread to end, once it was told to."""
        self._thread.join(seconds)

    def _submit(self, request: Request) -> QueueTicket:
        ticket = self.tickets[request.id] = QueueTicket(request, self._forget)
        self._commands.put(lambda: self._begin(request))
        return ticket

    def _forget(self, request_id: int) -> None:
        if self.tickets.pop(request_id, None):
            self._commands.put(lambda: self._end(request_id))

    def _deliver(self, tokens: list[Streamed]) -> None:
        for token in tokens:
            if ticket := self.tickets.get(token.request):
                ticket.queue.put_nowait(refusal.nan() if token.reason == "error" else token)

    def _refuse(self, request_id: int, reason: Refusal) -> None:
        if ticket := self.tickets.get(request_id):
            ticket.queue.put_nowait(reason)

    def _fail(self, reason: Refusal) -> None:
        self.problem = reason
        for ticket in self.tickets.values():
            ticket.queue.put_nowait(reason)

    # What follows runs in the engine's thread.

    def _run(self) -> None:
        try:
            while self._obey():
                step = self.engine.step()
                self.num_steps += 1
                self._seen = self._look()
                self._tell(self._deliver, step.tokens)
                self._drop_completions(step)
        except BaseException as error:  # whatever it was, those who wait are told
            self._tell(self._fail, refusal.failed(f"{type(error).__name__}: {error}"))
            if not isinstance(error, Exception):
                raise

    def _obey(self) -> bool:
        """Does what was ordered since the last step; waits while there is nothing to run."""
        while self.engine.idle or not self._commands.empty():
            if self._commands.empty():
                self._seen = self._look()
            command = self._commands.get()
            if command is None:
                return False
            command()
        return True

    def _begin(self, request: Request) -> None:
        try:
            self.engine.submit(request)
        except ValueError as error:  # it could never run
            self._tell(self._refuse, request.id, Refusal(400, str(error)))

    def _end(self, request_id: int) -> None:
        self.engine.cancel(request_id)
        self.engine.completions.pop(request_id, None)

    def _drop_completions(self, step: Step) -> None:
        """All tokens were handed out; nobody asks for whole texts."""
        for token in step.tokens:
            self.engine.completions.pop(token.request, None)

    def _look(self) -> Callable[[], State]:
        """The engine's state, to be worked out by those who ask for it."""
        scheduler, holdings = self.engine.scheduler, self.engine.holdings()
        running, waiting = len(scheduler.running), len(scheduler.waiting)
        counters = {
            "steps": self.num_steps,
            "preemptions": scheduler.num_preemptions,
            "prefix_hit_tokens": self.engine.prefixes.num_hit_tokens,
        }
        return lambda: State(
            owners=holdings.owners().tolist(),
            block_size=self.engine.limits.block_size,
            gauges={"requests_running": running, "requests_waiting": waiting},
            counters=counters,
        )

    def _tell(self, callback: Callable, *args) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:  # the event loop is closed: nobody waits
            self._commands.put(None)
