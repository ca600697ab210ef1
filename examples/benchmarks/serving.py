"""Serves requests that arrive at random, and times the engine beside one program for all steps.

    PYTHONPATH=examples python -m benchmarks.serving
    PYTHONPATH=examples python -m benchmarks.serving --shape llama-8b --out serving.json

Prompts of mixed lengths arrive at each of the rates, and their users wait for the first token and
for every further one. Then the engine decodes a full batch, and so does `serving/generation.py:
decode_loop`, with no host between two tokens: what the engine loses is what serving costs.
"""

import argparse
from dataclasses import asdict, dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table
from serving.decoder import Decoder
from serving.engine import Engine
from serving.limits import Limits

from benchmarks.load import Load, all_running, serve
from benchmarks.machine import caption, machine, write
from benchmarks.models import add_arguments, model_called
from benchmarks.steps import BLOCK_SIZE, seconds_a_step
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


def full_batch(engine: Engine, plan: Plan, args: argparse.Namespace) -> dict:
    """The engine and one program decode the same batch: tokens a second, and the share."""
    model, params, rng = engine.model, engine.params, np.random.default_rng(0)
    lengths = lengths_of(plan).tolist()
    prompts = [tuple(rng.integers(model.vocab_size, size=n).tolist()) for n in lengths]
    ours = all_running(engine, prompts, args.steps, first_id=10)
    loop = seconds_a_step(model, params, lengths, args.steps, args.backend)
    return {
        "running": plan.running,
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
    engine = Engine(params, model, plan.limits(room), args.backend)
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
