"""Times a decode loop in one compiled program against the same loop stepped from Python.

    python examples/decode_loop.py
    python examples/decode_loop.py --backend sdpa --new-tokens 256 --json decode_loop.json

Both run the same step (engine/generation.py) on the shipped model. In the stepped loop Python asks
after each token whether any sequence goes on: a round trip to the host. Each loop runs on a small
cache and on one many times as large. The time must not grow with the cache, and the caches must
stay where they are in memory: if they move, a step copies them. The exit status is 1 when a cache
moved, or when the texts differ.
"""

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import jax
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.checkpoint.tokenizer import load_tokenizer
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.engine.generation import Generation, decode_loop, decode_step, prefill, start
from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.families.fused import fused
from rich.console import Console
from rich.table import Table
from rich.text import Text

import pagedattn
from pagedattn import available_backends

HEADINGS = ("backend", "loop", "cache", "ms/token", "round trips", "torch calls", "caches")


@dataclass(frozen=True)
class Outcome:
    """The fastest run of a loop.

    Fields:
      host_round_trips: how often Python waited for the device.
      torch_calls: how often the compiled programs called torch.
      in_place: whether every cache ended in the buffer in which it started.
    """

    backend: str
    loop: str
    cache_bytes: int
    ms_per_token: float
    host_round_trips: int
    torch_calls: int
    in_place: bool
    tokens: list[list[int]]


def compiled_loop(params: dict, model: Decoder, backend: str, temperature: float):
    """A function from a prefilled state to the final one and its round trips: one."""

    def run(state: Generation) -> tuple[Generation, int]:
        longest = state.tokens.shape[1]
        state = decode_loop(params, model, state, temperature, longest, backend)
        return jax.block_until_ready(state), 1

    return run


def stepped_loop(params: dict, model: Decoder, backend: str, temperature: float):
    """Like `compiled_loop`, but Python asks after each step whether to go on."""

    def run(state: Generation) -> tuple[Generation, int]:
        steps = 0
        while state.live.any():
            state = decode_step(params, model, state, temperature, backend)
            steps += 1
        return jax.block_until_ready(state), steps + 1

    return run


LOOPS = {"compiled": compiled_loop, "stepped": stepped_loop}


def measure(make_state: Callable[[], Generation], loops: dict[str, Callable], repeats: int) -> dict:
    """The fastest run of each loop: seconds, final state, round trips, whether in place.

    The loops take turns, so that a busy machine slows both; the first turn compiles.
    """
    runs = {name: [] for name in loops}
    for _ in range(repeats + 1):
        for name, run in loops.items():
            state = jax.block_until_ready(make_state())
            before, begin = pointers(state), time.perf_counter()
            state, trips = run(state)
            seconds = time.perf_counter() - begin
            runs[name].append((seconds, state, trips, pointers(state) == before))
    return {name: min(timed[1:], key=lambda run: run[0]) for name, timed in runs.items()}


def pointers(state: Generation) -> list[int]:
    """Where the keys and values of every layer lie."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state.caches)]


def torch_calls_per_step(params: dict, model: Decoder, state: Generation, backend: str) -> int:
    """How many calls of torch the program of one step holds."""
    program = decode_step.lower(params, model, state, 0.0, backend).as_text()
    return program.count("@pagedattn_torch_call")


def outcomes_of(args: argparse.Namespace, backend: str) -> list[Outcome]:
    """Both loops on both sizes of the cache."""
    model, params = load_checkpoint(args.model)
    params = fused(params)
    encode = load_tokenizer(args.model).encode
    prompts = [encode(prompt) for prompt in PROMPTS[: args.sequences]]
    loops = {name: loop(params, model, backend, args.temperature) for name, loop in LOOPS.items()}
    outcomes = []
    for num_blocks in (args.num_blocks, args.num_blocks * args.factor):

        def make_state(num_blocks: int = num_blocks) -> Generation:
            sizes = {"max_new_tokens": args.new_tokens, "num_blocks": num_blocks}
            state = start(params, model, prompts, [0] * len(prompts), **sizes)
            longest = max(map(len, prompts))
            return prefill(params, model, state, args.temperature, longest, backend)

        calls = torch_calls_per_step(params, model, make_state(), backend)
        for name, measured in measure(make_state, loops, args.repeats).items():
            outcomes.append(outcome_of(backend, name, prompts, calls, *measured))
    return outcomes


def outcome_of(backend, loop, prompts, calls, seconds, state, trips, in_place) -> Outcome:
    lengths = state.lengths.tolist()
    new = max(length - len(prompt) for length, prompt in zip(lengths, prompts, strict=True))
    steps = new - 1  # the prefill gave the first token
    return Outcome(
        backend=backend,
        loop=loop,
        cache_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(state.caches)),
        ms_per_token=1e3 * seconds / steps,
        host_round_trips=trips,
        torch_calls=calls * steps,
        in_place=in_place,
        tokens=state.tokens.tolist(),
    )


def versions() -> dict[str, str]:
    return {
        "device": jax.devices()[0].device_kind,
        "machine": platform.processor() or platform.machine(),
        "jax": jax.__version__,
        "pagedattn": pagedattn.__version__,
        "python": platform.python_version(),
    } | ({"torch": version("torch")} if "sdpa" in available_backends() else {})


def show(outcomes: list[Outcome], args: argparse.Namespace) -> None:
    title = f"{args.sequences} sequences, {args.new_tokens} new tokens each at most"
    caption = ", ".join(f"{name} {value}" for name, value in versions().items())
    table = Table(title=title, caption=caption)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for outcome in outcomes:
        table.add_row(
            outcome.backend,
            outcome.loop,
            f"{outcome.cache_bytes / 1e6:,.0f} MB",
            f"{outcome.ms_per_token:.2f}",
            str(outcome.host_round_trips),
            str(outcome.torch_calls),
            Text("in place", "green") if outcome.in_place else Text("copied", "red"),
        )
    Console(markup=False).print(table)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", help="this one alone; default: xla, and sdpa where it is")
    parser.add_argument("--model", type=Path, default=SHIPPED, help="a checkpoint's folder")
    parser.add_argument("--sequences", type=int, default=4, choices=range(1, len(PROMPTS) + 1))
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest")
    parser.add_argument("--num-blocks", type=int, default=256, help="of the smaller cache")
    parser.add_argument("--factor", type=int, default=16, help="how much larger the other is")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures there")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse_args(arguments)
    usable = [name for name in ("xla", "sdpa") if name in available_backends()]
    backends = [args.backend] if args.backend else usable
    outcomes = [outcome for name in backends for outcome in outcomes_of(args, name)]
    show(outcomes, args)
    if args.json:
        rows = [{k: v for k, v in asdict(outcome).items() if k != "tokens"} for outcome in outcomes]
        args.json.write_text(json.dumps({"versions": versions(), "runs": rows}, indent=2) + "\n")
    same = all(outcome.tokens == outcomes[0].tokens for outcome in outcomes)
    print("All texts are the same." if same else "The texts differ.")
    return 0 if same and all(outcome.in_place for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
