"""Times whole decode steps of a model, as shares of the time that reading their bytes takes.

    PYTHONPATH=examples python -m benchmarks.whole_step --shape llama-8b --out whole_step.json
    PYTHONPATH=examples python -m benchmarks.whole_step --cases 4x64 --steps 4

A case is BATCHxCONTEXT: so many sequences with so many cached tokens each, of random keys and
values. `serving/generation.py: decode_loop`, one program, decodes them. A step has to read the
weights and the cache; how fast the device copies is measured in the same run. The roofline takes
into account that products of many rows are bound by arithmetic.
"""

import argparse

from rich.console import Console
from rich.table import Table
from serving.decoder import Decoder

from benchmarks.machine import caption, machine, write
from benchmarks.models import add_arguments, model_called
from benchmarks.steps import needs_of_a_step, seconds_a_step

CASES = {"llama-8b": "64x4096,1x1024,8x2048,256x1024"}
HEADINGS = (
    "batch x context",
    "ms a step",
    "tokens/s",
    "GB read",
    "ms to read them",
    "share",
    "of the roofline",
)


def measure(model: Decoder, params: dict, case: str, args: argparse.Namespace, about: dict) -> dict:
    """One case, on a machine described by `about`."""
    batch, context = map(int, case.split("x"))
    seconds = seconds_a_step(model, params, [context] * batch, args.steps, args.backend)
    middle = context + args.steps * 3 // 2  # the cache grows while it is measured
    needs = needs_of_a_step(model, params, [middle] * batch)
    copy_s, product_s = 1e9 * about["copy_gb_s"], 1e12 * about["product_tflop_s"]
    return {
        "case": case,
        "ms": 1e3 * seconds,
        "tokens_s": batch / seconds,
        "gb_read": needs.bytes / 1e9,
        "ms_to_read": 1e3 * needs.bytes / copy_s,
        "share": needs.bytes / copy_s / seconds,
        "of_roofline": needs.roofline(copy_s, product_s) / seconds,
    }


def table_of(data: dict) -> Table:
    table = Table(title=f"Decode steps of {data['model']}", caption=caption(data["machine"]))
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for row in data["cases"]:
        table.add_row(
            row["case"],
            f"{row['ms']:.2f}",
            f"{row['tokens_s']:,.0f}",
            f"{row['gb_read']:.2f}",
            f"{row['ms_to_read']:.2f}",
            f"{row['share']:.2f}",
            f"{row['of_roofline']:.2f}",
        )
    return table


def parse_args(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--cases", help="BATCHxCONTEXT, separated by commas")
    parser.add_argument("--steps", type=int, default=24, help="of each of three runs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> dict:
    args = parse_args(arguments)
    about = machine()
    model, params = model_called(args.shape, dict(args.size))
    data = {"machine": about, "model": args.shape, "sizes": dict(args.size), "cases": []}
    for case in (args.cases or CASES.get(args.shape, "8x256,1x256")).split(","):
        row = measure(model, params, case, args, about)
        data["cases"].append(row)
        print(f"{case}: {row['ms']:.2f} ms a step, {row['share']:.2f}", flush=True)
        write(args.out, data)
    Console(markup=False).print(table_of(data))
    return data


if __name__ == "__main__":
    main()
