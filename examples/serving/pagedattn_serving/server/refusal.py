"""Why a request is not served, in the form that OpenAI's clients know."""

from dataclasses import dataclass

TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
BUSY, DRAINING, FAILED = "server_busy", "server_stopping", "engine_failed"
NAN = "model_computed_nan"


@dataclass
class Refusal(Exception):
    """A status, a text, and the parameter to blame, if one is.

    Fields:
      retry_after: seconds after which the same request may be served.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @property
    def body(self) -> dict:
        kind = TYPES.get(self.status, "invalid_request_error")
        parts = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": parts}

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}

    def __reduce__(self):
        """Exceptions pickle their `args` alone, and replicas send refusals to each other."""
        parts = (self.status, self.message, self.param, self.code, self.retry_after)
        return Refusal, parts


def invalid(param: str, message: str, code: str | None = None) -> Refusal:
    """What is wrong with one parameter; its name may be the client's, and no text."""
    param = param.encode(errors="backslashreplace").decode()
    return Refusal(400, f"{param}: {message}", param, code)


def busy(limit: int) -> Refusal:
    text = f"{limit} requests are being served or wait already; try again in a second"
    return Refusal(429, text, code=BUSY, retry_after=1)


def draining() -> Refusal:
    return Refusal(503, "the server is stopping", code=DRAINING, retry_after=5)


def failed(reason: str) -> Refusal:
    return Refusal(500, f"the engine failed: {reason}", code=FAILED)


def nan() -> Refusal:
    return Refusal(500, "the model computed NaN for this request; others are served", code=NAN)
