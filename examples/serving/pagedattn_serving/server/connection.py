"""Bodies of bounded size, answers for as long as the client is there, and server-sent events."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pagedattn_serving.server.refusal import Refusal

BODY_SECONDS = 30.0  # for a client to send its body
SEND_SECONDS = 60.0  # for a client to read a chunk, once the buffers are full
DONE = b"data: [DONE]\n\n"
T = TypeVar("T")


async def read_json(request: Request, most: int):
    """The body; Refusal if it is too long, too slow, or no JSON."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    text = f"the body is longer than {most} bytes"
                    raise Refusal(413, text, code="body_too_large")
    except TimeoutError as error:
        raise Refusal(408, f"the body took more than {BODY_SECONDS:.0f} s") from error
    try:
        return json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is no JSON: {str(error)[:200]}") from error


async def while_connected(receive: Receive, work: Awaitable[T]) -> T:
    """The work's result; ClientDisconnect, and the work is cancelled, once the client is gone."""
    task, gone = asyncio.ensure_future(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def refused(refusal: Refusal) -> JSONResponse:
    return JSONResponse(refusal.body, refusal.status, refusal.headers)


class Events(Response):
    """Sends each record as an event; `ended` is told how it went, however that was.

    A Refusal before the first record is an answer with its status; a later one is the last event.
    """

    media_type = "text/event-stream"

    def __init__(self, records: AsyncGenerator[dict, None], ended: Callable[[str | None], None]):
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.records, self.ended = records, ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        outcome = "error"
        try:
            outcome = await while_connected(receive, self._answer(scope, receive, send))
        except (ClientDisconnect, TimeoutError, OSError):
            outcome = "cancelled"  # the client is gone, or does not read: nobody is to be told
        finally:
            await self.records.aclose()
            self.ended(outcome)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> str | None:
        """None, or "error"."""
        try:
            first = await anext(self.records)
        except Refusal as refusal:
            await refused(refusal)(scope, receive, send)
            return "error"
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        outcome, last = None, DONE
        try:
            await _send(send, _event(first))
            async for record in self.records:
                await _send(send, _event(record))
        except Refusal as refusal:
            outcome, last = "error", _event(refusal.body)
        await _send(send, last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return outcome


async def _send(send: Send, body: bytes) -> None:
    async with asyncio.timeout(SEND_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(record: dict) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _no_constant(name: str):
    raise ValueError(f"{name} is not a JSON number")
