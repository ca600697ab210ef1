"""What the web server asks of whoever runs the model: an engine's thread, or replicas elsewhere."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pagedattn_serving.decoding.request import Request, Streamed
from pagedattn_serving.server.refusal import Refusal


class Ticket(Protocol):
    """An accepted request: its tokens as they come, until each of its samples has its last."""

    def tokens(self) -> AsyncGenerator[Streamed, None]:
        """Raises Refusal if the request cannot be finished."""
        ...

    def close(self) -> None:
        """Nobody waits for the request any more; also called when it is finished."""
        ...


@dataclass(frozen=True)
class State:
    """How whoever runs the model is, for /health, /pool and /metrics.

    Fields:
      problem: why no request is taken, if none is.
      owners: the request in each block, or -1 for a free and -2 for a cached one.
      gauges, counters: other numbers by the names of metrics, without the prefix of all.
    """

    problem: str | None = None
    owners: Sequence[int] = ()
    block_size: int = 1
    gauges: Mapping[str, float] = field(default_factory=dict)
    counters: Mapping[str, float] = field(default_factory=dict)


class Engines(Protocol):
    """Takes requests and hands out their tokens.

    Fields:
      max_requests: how many it may have at a time, so more at once can never be taken.
    """

    max_requests: int

    async def open(self, requests: Sequence[Request]) -> Sequence[Ticket]:
        """Takes all requests or none, and numbers them itself; Refusal if it takes none."""
        ...

    async def state(self) -> State: ...


@dataclass
class QueueTicket:
    """A ticket that is filled from the event loop's own thread."""

    request: Request
    forget: "Forget"
    queue: asyncio.Queue[Streamed | Refusal] = field(default_factory=asyncio.Queue)

    async def tokens(self) -> AsyncGenerator[Streamed, None]:
        live = self.request.decoding.width
        while live:
            token = await self.queue.get()
            if isinstance(token, Refusal):
                raise token
            live -= token.final
            yield token

    def close(self) -> None:
        self.forget(self.request.id)


class Forget(Protocol):
    def __call__(self, request_id: int) -> None: ...
