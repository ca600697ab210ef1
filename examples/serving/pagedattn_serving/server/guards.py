"""Who may ask: those who have the key, and from which origins browsers may."""

from hashlib import sha256
from secrets import compare_digest

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from pagedattn_serving.server.connection import refused
from pagedattn_serving.server.refusal import Refusal

OPEN = ("/", "/health", "/ping")  # the page, which asks for the key, and what load balancers ask
SCHEME = "bearer "


def guards(api_key: str | None, origins: tuple[str, ...]) -> list[Middleware]:
    """The middleware for `make_app`; answers to browsers' own questions need no key."""
    cors = {"allow_origins": origins, "allow_methods": ("GET", "POST"), "allow_headers": ("*",)}
    cors |= {"expose_headers": ("Retry-After",)}
    keyed = [Middleware(RequireKey, key=api_key)] if api_key is not None else []
    return ([Middleware(CORSMiddleware, **cors)] if origins else []) + keyed


class RequireKey:
    """Answers 401 to requests without `Authorization: Bearer KEY`, as OpenAI does."""

    def __init__(self, app: ASGIApp, key: str):
        self.app, self.expected = app, _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._fits(Headers(scope=scope)):
            return await self.app(scope, receive, send)
        text = "this server wants its key, as Authorization: Bearer KEY"
        response = refused(Refusal(401, text, code="invalid_api_key"))
        response.headers["WWW-Authenticate"] = "Bearer"
        return await response(scope, receive, send)

    def _fits(self, headers: Headers) -> bool:
        given = headers.get("authorization", "")
        bearer = given[: len(SCHEME)].lower() == SCHEME
        key = given[len(SCHEME) :].strip().encode("latin-1")
        return compare_digest(_digest(key), self.expected) and bearer


def _digest(key: bytes) -> bytes:
    """Of one length, so that a comparison's time tells nothing of the key's."""
    return sha256(key).digest()
