"""Serves requests that arrive at random, and times the engine beside one program for all steps.

    PYTHONPATH=examples python -m benchmarks.serving
    PYTHONPATH=examples python -m benchmarks.serving --shape llama-8b --out serving.json

Prompts of mixed lengths arrive at each of the rates, and their users wait for the first token and
for every further one. Then the engine decodes a full batch, and so does `engine/generation.py:
decode_loop`, with no host between two tokens: what the engine loses is what serving costs.
"""

import argparse
import time
from dataclasses import asdict, dataclass, field, replace

import numpy as np
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.families.decoder import Decoder
from rich.console import Console
from rich.table import Table

from benchmarks.machine import caption, machine, write
from benchmarks.models import add_arguments, model_called
from benchmarks.random_arrays import BLOCK_SIZE
from benchmarks.whole_step import seconds_a_step
from pagedattn.extend import cdiv


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; `budget` is the tokens of a step with prompts in it."""

    running: int
    budget: int
    shortest: int
    longest: int
    new_tokens: int
    rates: tuple[float, ...]

    def limits(self, room: int) -> Limits:
        """For the longest prompt and `room` tokens more in each of the running sequences."""
        blocks = cdiv(self.longest + room, BLOCK_SIZE)
        return Limits(
            num_blocks=self.running * blocks,
            block_size=BLOCK_SIZE,
            max_seq_len=blocks * BLOCK_SIZE,
            max_seqs=self.running,
            token_budget=self.budget,
            max_query_len=self.budget,
        )


PLANS = {
    "pydoc-llama": Plan(8, 64, 16, 128, 32, (2, 8)),
    "llama-8b": Plan(64, 512, 100, 4000, 128, (2, 5, 8)),
}
FIGURES = {
    "rate": "requests/s",
    "running": "running",
    "tokens_s": "tokens/s",
    "first_p50_ms": "first token p50, ms",
    "first_p99_ms": "p99",
    "between_p50_ms": "between tokens p50, ms",
    "between_p99_ms": "p99",
}


@dataclass(frozen=True)
class Load:
    """Poisson arrivals of prompts of random tokens, their lengths spread evenly.

    Fields:
      rate: requests a second.
      seconds: how long they arrive.
      shortest, longest: tokens of a prompt.
      new_tokens: tokens that each asks for.
    """

    rate: float
    seconds: float
    shortest: int
    longest: int
    new_tokens: int

    def arrivals(self, vocab_size: int, first_id: int) -> list[tuple[float, Request]]:
        """When each request comes, in seconds from the start."""
        rng = np.random.default_rng(first_id)
        count = max(1, round(self.rate * self.seconds))
        times = np.cumsum(rng.exponential(1 / self.rate, count)).tolist()
        lengths = rng.integers(self.shortest, self.longest, count, endpoint=True)
        prompts = [tuple(rng.integers(vocab_size, size=n).tolist()) for n in lengths]
        return [
            (when, Request(first_id + i, prompt, self.new_tokens, GREEDY))
            for i, (when, prompt) in enumerate(zip(times, prompts, strict=True))
        ]


@dataclass
class Seen:
    """What the users of a load saw.

    Fields:
      asked: when each request was sent; seconds since the start.
      came: when each of its tokens came.
      running: how many requests were running at each step.
    """

    asked: dict[int, float] = field(default_factory=dict)
    came: dict[int, list[float]] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Tokens a second from the first request to the last token, and latencies in ms."""
        times = list(self.came.values())
        first = [each[0] - self.asked[i] for i, each in self.came.items()]
        between = np.concatenate([np.diff(each) for each in times])
        seconds = max(each[-1] for each in times) - min(self.asked.values())
        return {
            "requests": len(times),
            "running": float(np.mean(self.running)),
            "tokens_s": sum(map(len, times)) / seconds,
            "first_p50_ms": 1e3 * float(np.percentile(first, 50)),
            "first_p99_ms": 1e3 * float(np.percentile(first, 99)),
            "between_p50_ms": 1e3 * float(np.percentile(between, 50)),
            "between_p99_ms": 1e3 * float(np.percentile(between, 99)),
        }


def serve(engine: Engine, arrivals: list[tuple[float, Request]]) -> Seen:
    """Runs the engine while the requests arrive, to the end of the last."""
    seen, waiting, start = Seen(), arrivals[::-1], time.perf_counter()
    while waiting or not engine.idle:
        now = time.perf_counter() - start
        while waiting and waiting[-1][0] <= now:
            when, request = waiting.pop()
            engine.submit(request)
            seen.asked[request.id] = when
        if engine.idle:
            time.sleep(max(0.0, waiting[-1][0] - now))
            continue
        tokens = engine.step().tokens
        now = time.perf_counter() - start
        seen.running.append(len(engine.scheduler.running))
        for token in tokens:
            seen.came.setdefault(token.request, []).append(now)
    return seen


def all_running(engine: Engine, prompts: list[tuple[int, ...]], steps: int, first_id: int) -> float:
    """Seconds a step while all prompts, and nothing else, are being decoded."""
    longest = max(map(len, prompts))
    room = engine.limits.max_seq_len - longest
    for index, prompt in enumerate(prompts):
        engine.submit(Request(first_id + index, prompt, room, GREEDY))
    while decoded(engine) < len(prompts):
        engine.step()
    engine.step()
    start = time.perf_counter()
    count = sum(len(engine.step().tokens) for _ in range(steps))
    seconds = time.perf_counter() - start
    for index in range(len(prompts)):
        engine.cancel(first_id + index)
    if count != steps * len(prompts):
        raise RuntimeError(f"expected {len(prompts)} tokens a step: raise max_seq_len, {room} left")
    return seconds / steps


def decoded(engine: Engine) -> int:
    """How many of the running requests have got a token."""
    groups = engine.scheduler.running
    return sum(bool(group.completion(group.sequences[0])) for group in groups)


def full_batch(engine: Engine, plan: Plan, args: argparse.Namespace) -> dict:
    """The engine and one program decode the same batch: tokens a second, and the share."""
    model, params, rng = engine.model, engine.params, np.random.default_rng(0)
    lengths = lengths_of(plan).tolist()
    prompts = [tuple(rng.integers(model.vocab_size, size=n).tolist()) for n in lengths]
    ours = all_running(engine, prompts, args.steps, first_id=10)
    loop = seconds_a_step(model, params, lengths, args.steps, args.backend)
    return {
        "running": plan.running,
        "batch_invariant": engine.batch_invariant,
        "loop_tokens_s": plan.running / loop,
        "engine_tokens_s": plan.running / ours,
        "share": loop / ours,
    }


def lengths_of(plan: Plan) -> np.ndarray:
    """The prompts of the full batch."""
    rng = np.random.default_rng(0)
    return rng.integers(plan.shortest, plan.longest, plan.running, endpoint=True)


def ready_engine(model: Decoder, params: dict, plan: Plan, args: argparse.Namespace) -> Engine:
    """An engine for the whole run, which has compiled all that serving needs."""
    # The first prompts of the full batch are decoded while the others are computed.
    prefill = cdiv(int(lengths_of(plan).sum()), plan.budget - plan.running)
    room = max(2 * args.steps + prefill, plan.new_tokens)
    options = {"backend": args.backend, "batch_invariant": args.batch_invariant}
    engine = Engine(params, model, plan.limits(room), **options)
    for first_id in (0, 2):  # the second time the prompts are found in the prefix cache
        all_running(engine, [(0,) * plan.longest, (1,) * plan.longest], BLOCK_SIZE, first_id)
    engine.prefixes.evict([1] * len(engine.memory.pools))
    return engine


def under_load(engine: Engine, plan: Plan, args: argparse.Namespace) -> list[dict]:
    rows = []
    for index, rate in enumerate(args.rates or plan.rates):
        load = Load(rate, args.seconds, plan.shortest, plan.longest, plan.new_tokens)
        arrivals = load.arrivals(engine.model.vocab_size, first_id=10_000 * (index + 1))
        rows.append(asdict(load) | serve(engine, arrivals).figures())
        print({name: round(rows[-1][name], 1) for name in FIGURES}, flush=True)
    return rows


def tables_of(data: dict) -> list[Table]:
    plan, full = data["plan"], data["full"]
    batch = Table(title=f"{data['model']}: {full['running']} sequences decoding, tokens/s")
    for heading in ("one program", "engine", "share"):
        batch.add_column(heading, justify="right")
    rates = (f"{full[name]:,.0f}" for name in ("loop_tokens_s", "engine_tokens_s"))
    batch.add_row(*rates, f"{full['share']:.2f}")
    asked = f"prompts of {plan['shortest']} to {plan['longest']}, {plan['new_tokens']} new tokens"
    loads = Table(title=f"Under load: {asked}", caption=caption(data["machine"]))
    for heading in FIGURES.values():
        loads.add_column(heading, justify="right")
    for row in data["loads"]:
        loads.add_row(*(f"{row[name]:,.1f}" for name in FIGURES))
    return [batch, loads]


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--rates", type=float, nargs="*", help="requests a second")
    parser.add_argument("--seconds", type=float, default=6, help="that requests arrive, at a rate")
    parser.add_argument("--running", type=int, help="sequences at a time")
    parser.add_argument("--longest", type=int, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=48, help="timed of the full batch")
    parser.add_argument("--batch-invariant", action="store_true", help="the engine's mode")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict:
    args = parse_args(arguments)
    given = {name: getattr(args, name) for name in ("running", "longest") if getattr(args, name)}
    plan = replace(PLANS[args.shape], **given)
    data = {"machine": machine(), "model": args.shape, "plan": asdict(plan)}
    engine = ready_engine(*model_called(args.shape, dict(args.size)), plan, args)
    data["loads"] = under_load(engine, plan, args)
    write(args.out, data)
    data["full"] = full_batch(engine, plan, args)
    print(data["full"], flush=True)
    write(args.out, data)
    for table in tables_of(data):
        Console(markup=False).print(table)
    return data


if __name__ == "__main__":
    main()
