"""Serves a checkpoint by several replicas, with Ray Serve: `pip install './examples/serving[ray]'`.

    pagedattn-serve-ray DIR --replicas 2
    pagedattn-serve-ray DIR --replicas 1 --most 8 --gpus 1

The application is that of `pagedattn-serve`. Prompts that begin alike go to the same replica, which
has their beginning cached, unless it has much more to do than another. With `--most` the number of
replicas follows the load.
"""

# Ray is in no environment of the tests.
# pyright: reportMissingImports=false
import argparse
import os
import signal
import sys
import threading
from importlib.util import find_spec

from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import CONFIG, read_config
from pagedattn_serving.server.arguments import limits_of, make_parser, middleware_of, number_from
from pagedattn_serving.server.text import load_text

NAME = "pagedattn-serve-ray"


def parse_args() -> argparse.Namespace:
    parser = make_parser(NAME, __doc__)
    parser.add_argument("--port", type=number_from(1, 65535), default=8000)
    parser.add_argument("--replicas", type=number_from(1), default=2, help="the fewest")
    parser.add_argument("--most", type=number_from(1), help="default: as many as the fewest")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    try:
        limits = checked(args)  # no tensors yet: Ray forks, which JAX's threads may not survive
    except (ValueError, OSError, ImportError) as error:
        sys.exit(f"{NAME}: {error}")
    run(args, limits)


def checked(args: argparse.Namespace) -> Limits:
    """Raises ImportError without Ray, ValueError for what is wrong with the arguments."""
    if find_spec("ray") is None:
        raise ImportError("there is no Ray: pip install './examples/serving[ray]'")
    model = read_config(args.model / CONFIG)
    load_text(args.model, model.vocab_size)
    if args.most is not None and args.most < args.replicas:
        raise ValueError(f"--most {args.most} is fewer than --replicas {args.replicas}")
    return limits_of(args, model)


def run(args: argparse.Namespace, limits: Limits) -> None:
    """Serves until a signal comes."""
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions

    from pagedattn_serving.replicas.deployment import APP, application

    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)  # for the replicas
    serve.start(http_options=HTTPOptions(host=args.host, port=args.port))
    name = args.name or args.model.resolve().name
    app = application(
        args.model,
        limits,
        name=name,
        replicas=args.replicas,
        most=args.most,
        dtype=args.dtype,
        backend=args.backend,
        batch_invariant=args.batch_invariant,
        kv_cache_dtype=args.kv_cache_dtype,
        middleware=middleware_of(args),
        num_gpus=args.gpus,
    )
    serve.run(app, name=APP, route_prefix="/")
    print(f"{name} is served at http://{args.host}:{args.port}", flush=True)
    wait_for_a_signal()
    serve.delete(APP)  # nothing new is taken, and what runs ends; shutdown would cut it off
    serve.shutdown()
    ray.shutdown()


def wait_for_a_signal() -> None:
    """Until here Ray's own handlers end the process; they would not wait for what runs."""
    come = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: come.set())
    come.wait()


if __name__ == "__main__":
    main()
