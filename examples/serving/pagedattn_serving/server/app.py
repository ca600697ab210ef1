"""The web server: routes, and the way of a request through them."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Match, Route

import pagedattn
from pagedattn_serving.server.connection import Events, read_json, refused, while_connected
from pagedattn_serving.server.generation import Generation, Served, open_generation, tokens_of
from pagedattn_serving.server.metrics import Metrics
from pagedattn_serving.server.openai_format import ChatFormat, CompletionFormat
from pagedattn_serving.server.refusal import Refusal
from pagedattn_serving.server.request_schema import (
    Parameters,
    read_chat,
    read_completion,
    read_tokenize,
)
from pagedattn_serving.server.response import Piece, joined
from pagedattn_serving.server.tickets import Engines

PAGE = Path(__file__).with_name("page.html")
MAX_BODY = 4 << 20
GONE = 499  # nginx's name for a client that left; nobody reads it


@dataclass
class Api:
    """The endpoints of one model."""

    served: Served
    engines: Engines
    max_body: int = MAX_BODY
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))

    async def completions(self, request: Request) -> Response:
        return await self._serve(request, "completions", read_completion, CompletionFormat)

    async def chat(self, request: Request) -> Response:
        return await self._serve(request, "chat", read_chat, ChatFormat)

    async def models(self, request: Request) -> Response:
        del request
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        self.served.require(request.path_params["name"])
        return JSONResponse(self._model())

    async def version(self, request: Request) -> Response:
        del request
        return JSONResponse({"version": pagedattn.__version__})

    async def tokenize(self, request: Request) -> Response:
        """In vLLM's format."""
        parameters, spelled = read_tokenize(
            await read_json(request, self.max_body), self.served.name
        )
        self.served.require(parameters.model)
        text = self.served.text
        [tokens] = await asyncio.to_thread(tokens_of, text, parameters)
        names = [text.spell(token)[0] for token in tokens] if spelled else None
        told = {"count": len(tokens), "max_model_len": self.served.longest(1), "tokens": tokens}
        return JSONResponse(told | {"token_strs": names})

    async def health(self, request: Request) -> Response:
        del request
        problem = (await self.engines.state()).problem
        if problem is None:
            return JSONResponse({"status": "ok"})
        return JSONResponse({"status": "not serving", "reason": problem}, 503)

    async def pool(self, request: Request) -> Response:
        """The request in each block of the pool; -1 is free, -2 is kept by the prefix cache."""
        del request
        state = await self.engines.state()
        owners, counts = list(state.owners), {**state.gauges, **state.counters}
        return JSONResponse({"owners": owners, "block_size": state.block_size, **counts})

    async def show_metrics(self, request: Request) -> Response:
        del request
        self.metrics.state = await self.engines.state()
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4")

    async def page(self, request: Request) -> Response:
        del request
        return HTMLResponse(PAGE.read_text())

    def _model(self) -> dict:
        about = {"created": self.created, "owned_by": "pagedattn"}
        longest = self.served.longest(1)
        return {"id": self.served.name, "object": "model", **about, "max_model_len": longest}

    async def _serve(
        self,
        request: Request,
        endpoint: str,
        read: Callable[[Any], Parameters],
        formatter: type[CompletionFormat],
    ) -> Response:
        try:
            parameters = read(await read_json(request, self.max_body))
            generation = await open_generation(self.served, self.engines, parameters)
        except Refusal:
            self.metrics.requests.labels(endpoint, "refused").inc()
            raise
        ended = self._watch(endpoint, generation)
        if parameters.stream:
            return Events(self._records(generation, formatter(generation)), ended)
        outcome: str | None = "error"
        try:
            answer = await while_connected(
                request.receive, self._whole(generation, formatter(generation))
            )
            outcome = None
            return JSONResponse(answer)
        except ClientDisconnect:
            outcome = "cancelled"
            return Response(status_code=GONE)
        finally:
            ended(outcome)

    def _watch(self, endpoint: str, generation: Generation) -> Callable[[str | None], None]:
        """To be called when it ends, with what became of it if not all samples ended."""
        start = time.monotonic()
        self.metrics.prompt_tokens.inc(generation.usage["prompt_tokens"])

        def ended(outcome: str | None) -> None:
            generation.close()
            outcome = outcome or (generation.reasons[-1] if generation.reasons else "error")
            self.metrics.requests.labels(endpoint, outcome).inc()
            self.metrics.tokens.inc(generation.num_tokens)
            self.metrics.whole.observe(time.monotonic() - start)

        return ended

    async def _pieces(self, generation: Generation) -> AsyncGenerator[Piece, None]:
        """The generation's pieces; the first one's time is noted."""
        start, first = time.monotonic(), True
        async with aclosing(generation.pieces()) as pieces:
            async for piece in pieces:
                if first:
                    self.metrics.first.observe(time.monotonic() - start)
                first = False
                yield piece

    async def _whole(self, generation: Generation, formatter: CompletionFormat) -> dict:
        choices: dict[int, list[Piece]] = {}
        async for piece in self._pieces(generation):
            choices.setdefault(piece.sample, []).append(piece)
        return formatter.whole([joined(choices[index]) for index in sorted(choices)])

    async def _records(
        self, generation: Generation, formatter: CompletionFormat
    ) -> AsyncGenerator[dict, None]:
        opened = False
        async with aclosing(self._pieces(generation)) as pieces:
            async for piece in pieces:
                if not opened:
                    for opening in formatter.openings():
                        yield opening
                opened = True
                yield formatter.chunk(piece)
        if generation.parameters.include_usage:
            yield formatter.closing()


def make_app(api: Api, **options) -> Starlette:
    """The ASGI application; `options` are Starlette's."""
    routes = [
        Route("/", api.page),
        Route("/health", api.health),
        Route("/ping", api.health, methods=["GET", "POST"]),
        Route("/version", api.version),
        Route("/metrics", api.show_metrics),
        Route("/pool", api.pool),
        Route("/v1/models", api.models),
        Route("/v1/models/{name:path}", api.model),
        Route("/v1/completions", api.completions, methods=["POST"]),
        Route("/v1/chat/completions", api.chat, methods=["POST"]),
        Route("/tokenize", api.tokenize, methods=["POST"]),
    ]
    handlers = {Refusal: _refused, HTTPException: _http_error, ClientDisconnect: _gone}
    handlers[Exception] = _bug
    return Starlette(routes=routes, exception_handlers=handlers, **options)


async def _refused(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, Refusal)
    return refused(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """No such path, or no such method on it: the client is told which there are."""
    assert isinstance(error, HTTPException)
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    if error.status_code == 405:
        routes = [route for route in routes if route.matches(request.scope)[0] != Match.NONE]
    there = ", ".join(f"{'/'.join(_methods(route))} {route.path}" for route in routes)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}; there is {there}"
    response = refused(Refusal(error.status_code, text))
    response.headers.update(error.headers or {})
    return response


def _methods(route: Route) -> list[str]:
    return sorted(method for method in route.methods or () if method != "HEAD")


async def _gone(request: Request, error: Exception) -> Response:
    """The client left while it sent its request."""
    del request, error
    return Response(status_code=GONE)


async def _bug(request: Request, error: Exception) -> Response:
    """What nobody foresaw; the traceback goes to the log."""
    del request
    return refused(Refusal(500, f"the server failed: {type(error).__name__}"))
