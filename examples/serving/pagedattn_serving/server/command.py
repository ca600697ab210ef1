"""Serves a Hugging Face checkpoint over HTTP, in the form of OpenAI's API.

    pagedattn-serve
    pagedattn-serve DIR --port 8000 --num-blocks 4096 --dtype bfloat16

http://127.0.0.1:8000 is then a page to try it on, and http://127.0.0.1:8000/v1 the base URL of
OpenAI's clients.
"""

import argparse
import errno
import socket
import sys

from pagedattn_serving.blocks.cache_dtypes import more_tokens
from pagedattn_serving.server.arguments import (
    limits_of,
    make_parser,
    middleware_of,
    number_from,
    port_number,
    seconds,
)
from pagedattn_serving.server.launch import load, local_app, ready_engine, run
from pagedattn_serving.server.thread import EngineThread

NAME = "pagedattn-serve"


def parse_args() -> argparse.Namespace:
    parser = make_parser(NAME, __doc__)
    parser.add_argument("--port", type=port_number, default=8000, help="0 takes any free one")
    parser.add_argument("--max-requests", type=number_from(1), default=64, help="that run or wait")
    drain = "seconds that running requests get upon SIGTERM (30)"
    parser.add_argument("--drain", type=seconds, default=30, help=drain)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        with listen(args.host, args.port) as listener:
            serve(args, listener)
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        sys.exit(f"{NAME}: {error}")


def listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=512)
    except OSError as error:
        cures = {
            errno.EADDRINUSE: f"another program has port {port}: --port names another, 0 any free",
            errno.EACCES: f"port {port} is the system's: --port names another, from 1024 up",
        }
        cure = cures.get(
            error.errno or 0, f"--host is an address or a name of this machine ({error})"
        )
        raise OSError(f"cannot listen on {host}:{port}; {cure}") from error


def serve(args: argparse.Namespace, listener: socket.socket) -> None:
    """Serves until a signal comes; raises what is wrong with the arguments before it begins."""
    loaded = load(args.model, args.name, args.dtype)
    limits = limits_of(args, loaded.model)
    options = args.backend, args.batch_invariant, args.kv_cache_dtype
    engine = ready_engine(loaded, limits, *options)
    if args.kv_cache_dtype != "auto":
        print(more_tokens(loaded.model, args.kv_cache_dtype, args.dtype), flush=True)
    thread = EngineThread(engine, args.max_requests)
    host, port = listener.getsockname()[:2]
    print(f"{loaded.name} is served at http://{host}:{port}", flush=True)
    app = local_app(loaded.served(limits), thread, middleware=middleware_of(args))
    run(app, thread, listener, args.drain)
