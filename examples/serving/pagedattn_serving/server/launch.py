"""An engine and its web server in this process, from a checkpoint's folder to a clean end."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import jax
import jax.numpy as jnp
import uvicorn
from safetensors import SafetensorError
from starlette.applications import Starlette
from starlette.middleware import Middleware

from pagedattn import InvalidInputError
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import CONFIG, load_checkpoint
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import Sampling
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.families.fused import fused
from pagedattn_serving.server.app import MAX_BODY, Api, make_app
from pagedattn_serving.server.generation import Served
from pagedattn_serving.server.text import Text, load_text
from pagedattn_serving.server.thread import EngineThread

TICK = 0.1  # seconds between two looks at whether a second signal has come
LAST_WORDS = 2.0  # seconds for errors to reach the clients, after the engine was stopped
LAST_STEP = 30.0  # seconds for the engine to end its step; a thread in one would abort the process


@dataclass(frozen=True)
class Loaded:
    """A checkpoint in memory."""

    name: str
    model: Decoder
    params: dict
    text: Text

    def served(self, limits: Limits) -> Served:
        model = self.model
        return Served(self.name, self.text, model.vocab_size, limits, model.windows)


def load(directory: Path, name: str | None = None, dtype: str = "float32") -> Loaded:
    """Raises InvalidInputError, with what is wrong with the folder."""
    try:
        model, params = load_checkpoint(directory, jnp.dtype(dtype))
        params, text = fused(params), load_text(directory, model.vocab_size)
    except InvalidInputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError, SafetensorError) as error:
        text = f"{type(error).__name__}: {error}"
        raise InvalidInputError(
            f"{directory} is no checkpoint that is read here: {text}"
        ) from error
    return Loaded(name or directory.resolve().name, model, params, text)


def ready_engine(
    loaded: Loaded,
    limits: Limits,
    backend: str | None = None,
    batch_invariant: bool = False,
    kv_cache_dtype: str = "auto",
) -> Engine:
    """An engine that has compiled its programs: the first client is not to wait for that.

    Raises ValueError if the model is not for these limits, the backend not for the model, the
    tensors not for the config or not numbers, or all of it too large for the device.
    """
    try:
        options = {"batch_invariant": batch_invariant, "kv_cache_dtype": kv_cache_dtype}
        engine = Engine(loaded.params, loaded.model, limits, backend, **options)
        _warm_up(engine)
    except TypeError as error:  # JAX's, for arrays that do not fit each other
        raise InvalidInputError(
            f"expected tensors of the shapes that {CONFIG} says, got others: {_first_line(error)}"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        raise InvalidInputError(
            f"the device does not run this model with these limits ({_first_line(error)}); fewer "
            "--num-blocks or --max-seqs need less memory"
        ) from error
    return engine


def _warm_up(engine: Engine) -> None:
    for prompt in ((0,), (0, 0)):
        request = Request(0, prompt, 1, Sampling(1.0, top_k=1, logprobs=0))
        if any(token.reason == "error" for token in engine.stream([request])):
            raise InvalidInputError(
                "the model computes NaN: expected numbers in all of its tensors, and a --dtype "
                "that holds what it computes"
            )
    engine.completions.clear()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def local_app(
    served: Served,
    thread: EngineThread,
    max_body: int = MAX_BODY,
    middleware: Sequence[Middleware] = (),
) -> Starlette:
    """The application over an engine's thread, which starts and ends with it."""

    @contextlib.asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        del app
        thread.start()
        yield
        thread.stop()

    return make_app(Api(served, thread, max_body), lifespan=life, middleware=middleware)


class Server(uvicorn.Server):
    """Ends in order: upon a signal it takes nothing new, and gives what runs `seconds` to end.

    What has not ended then, or at a second signal, gets an error, and the process ends with status
    0. A third signal waits for nobody.
    """

    def __init__(self, config: uvicorn.Config, thread: EngineThread, seconds: float):
        config.timeout_graceful_shutdown = int(seconds + 2 * LAST_WORDS)
        super().__init__(config)
        self.thread, self.seconds, self.hurried = thread, seconds, False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Replaces uvicorn's, which would end the process by the same signal again."""
        del sig, frame
        self.force_exit, self.hurried, self.should_exit = self.hurried, self.should_exit, True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.thread.drain()
        ending = asyncio.create_task(self._end())
        await super().shutdown(sockets)
        ending.cancel()
        self.thread.stop()
        self.thread.join(LAST_STEP)  # blocks the event loop, in which nobody waits any more

    async def _end(self) -> None:
        """Stops the engine when the time is over, or at a second signal."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.seconds):
                while not self.hurried:
                    await asyncio.sleep(TICK)
        self.thread.stop()


def run(app: Starlette, thread: EngineThread, listener: socket.socket, seconds: float) -> None:
    """Serves until a signal comes."""
    config = uvicorn.Config(app, log_level="warning", timeout_keep_alive=30)
    Server(config, thread, seconds).run([listener])
