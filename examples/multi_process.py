"""One model over the devices of several processes: tensor parallel by `jax.distributed`.

Start it once a process, on the same machine or on others, with one number different:

    python examples/multi_process.py --coordinator localhost:9876 --processes 2 --process 0
    python examples/multi_process.py --coordinator localhost:9876 --processes 2 --process 1

`--cpu-devices 2` gives each process two devices of its CPU, which talk by gloo. Every process runs
the whole program, and XLA lets each device do its part of it (parallel/tensor.py). The first
process is the coordinator. When one of them dies, the others end with an error: at once where a
collective loses its connection, else after `--heartbeat` seconds without a sign of life.
"""

import argparse
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.checkpoint.tokenizer import load_tokenizer
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.parallel.tensor import AXIS, generate


def join(args: argparse.Namespace) -> Mesh:
    """The mesh of all devices of all processes; before anything else asks JAX for its devices."""
    if args.cpu_devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", args.cpu_devices)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        args.coordinator,
        args.processes,
        args.process,
        heartbeat_timeout_seconds=args.heartbeat,
    )
    return Mesh(np.array(jax.devices()), AXIS)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--coordinator", required=True, help="host:port of process 0")
    parser.add_argument("--processes", type=int, required=True, help="how many there are")
    parser.add_argument("--process", type=int, required=True, help="which one this is, from 0")
    parser.add_argument("--cpu-devices", type=int, default=0, help="devices of its CPU, no others")
    parser.add_argument("--heartbeat", type=int, default=100, help="seconds until one counts dead")
    parser.add_argument("--model", type=Path, default=SHIPPED, help="a checkpoint's folder")
    parser.add_argument("--prompts", type=int, default=4, choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=1, help="how often to answer the prompts")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    args = parse_args(arguments)
    mesh = join(args)
    model, params = load_checkpoint(args.model)
    tokenizer, chosen = load_tokenizer(args.model), PROMPTS[: args.prompts]
    prompts = [tokenizer.encode(prompt) for prompt in chosen]
    sizes = {"max_new_tokens": args.new_tokens, "num_blocks": args.num_blocks}
    where = f"process {args.process} of {args.processes}, {mesh.size} devices in all"
    for _ in range(args.rounds):
        answers = generate(mesh, model, params, prompts, **sizes)
        for prompt, answer in zip(chosen, answers, strict=True):
            print(f"[{where}] {prompt!r} -> {tokenizer.decode(answer)!r}", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
