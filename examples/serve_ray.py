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
import os
import signal
import sys
import threading

import ray
from ray import serve
from ray.serve.config import HTTPOptions
from serving.checkpoint import CONFIG, read_config
from serving.limits import Limits
from serving.server.arguments import limits_of, make_parser, port_number
from serving.server.replicas import APP, application
from serving.server.text import load_text


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--port", type=port_number, default=8000)
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
