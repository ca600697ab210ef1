"""The report of a run with peers: printed as it comes, and kept as JSON that grows with it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import write

# Ceilings on a CPU, as contenders.
SUM = "a sum of as many bytes"
MULTIPLICATIONS = "as many multiplications"
SUM_OR_PRODUCT = "a sum of as many bytes, or a product of as many operations"


class Ceilings(NamedTuple):
    """What the machine does at best, a second: bytes of decode, and operations of the rest."""

    kv_bytes: float
    flops: float


class Report:
    """The results so far.

    `ours` are the names of our contenders. With `key`, the results are added to the file that is
    there: data[key[0]][key[1]].
    """

    def __init__(
        self,
        path: Path | None,
        machine: dict,
        ours: list[str],
        ceilings: Ceilings | None = None,
        key: tuple[str, str] | None = None,
        **more: Any,
    ):
        self.path, self.ceilings = path, ceilings
        self.data: dict[str, Any] = {"machine": machine, "ours": ours, "cases": {}, **more}
        self.file = self.data
        if path and key:
            self.file = json.loads(path.read_text())
            self.file.setdefault(key[0], {})[key[1]] = self.data
        print(json.dumps(machine, indent=1), flush=True)

    def begin(self, case, **more: Any) -> dict:
        """The row of a case: a new one, or the one that is there."""
        print(case.name, flush=True)
        row = {"kv_bytes": case.kv_bytes, "flops": case.flops, "decode": case.decode}
        return self.data["cases"].setdefault(case.name, row | more | {"us": {}, "refused": {}})

    def add(self, row: dict, name: str, result: float | str) -> None:
        """Adds a contender to a row: microseconds a call, or why there are none."""
        if isinstance(result, str):
            row["refused"][name] = result
            said = f"{'-':>10}     {result}"
        else:
            row["us"][name] = result
            said = f"{result:10.1f} us  {self.rate(row, name)}"
        print(f"  {name:30}{said}", flush=True)
        self.write()

    def miss(self, name: str, reason: str) -> None:
        """Records why a contender is left out."""
        print(f"{name} is left out: {reason}", flush=True)
        self.data.setdefault("missing", {})[name] = reason
        self.write()

    def rate(self, row: dict, name: str) -> str:
        """Bytes or operations a second, and the share of the machine's."""
        what, unit = ("kv_bytes", "B/s") if row["decode"] else ("flops", "FLOP/s")
        rate = 1e6 * row[what] / row["us"][name]
        said = f"{rate / 1e12:8.2f} T{unit}" if rate >= 1e12 else f"{rate / 1e9:8.1f} G{unit}"
        return f"{said} {rate / getattr(self.ceilings, what):6.2f}" if self.ceilings else said

    def write(self) -> None:
        write(self.path, self.file)

    def print_tables(self, ratios: dict[str, tuple[str, str]]) -> None:
        """Rates of all contenders, and ratios: the speed of one contender over another's."""
        for decode in (True, False):
            rows = {k: row for k, row in self.data["cases"].items() if row["decode"] is decode}
            if rows:
                _print_table(rows, "kv_bytes" if decode else "flops", ratios)


def _print_table(rows: dict[str, dict], what: str, ratios: dict[str, tuple[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    names = list(dict.fromkeys(name for row in rows.values() for name in row["us"]))
    title = {"kv_bytes": "GB/s of K and V", "flops": "GFLOP/s"}[what]
    table = Table(title=title, box=None, header_style="dim")
    for heading in ("", *names, *ratios):
        table.add_column(heading, justify="right" if heading else "left")
    for case, row in rows.items():
        us = row["us"]
        rates = (f"{row[what] / us[name] / 1e3:.1f}" if name in us else "-" for name in names)
        table.add_row(case, *rates, *(times_as_fast(us, *pair) for pair in ratios.values()))
    Console(width=240, markup=False).print(table)


def times_as_fast(us: dict[str, float], ours: str, other: str) -> str:
    return f"{us[other] / us[ours]:.2f}" if ours in us and other in us else "-"


def reason_of(error: Exception) -> str:
    """The first line of an error, as a report keeps it."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:160]}"
