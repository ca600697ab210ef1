"""The report as text for a screen of up to 80 columns: by rich, or plainly without rich."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from .._dispatch.crossings import NEVER
from ..testing.features import ATTENTION_TYPES

Table = list[Sequence[str]]  # rows, the heading first
TYPES = f"Attention of each type ({', '.join(ATTENTION_TYPES)}); partly: not of all."

MOST_LENS = 8  # lengths of a batch that are printed
UNMEASURED = (
    "Nobody has measured pagedattn on {}: docs/backends.md says what was tested for it, and "
    "python -m pagedattn --tune measures at which sizes which backend is ahead."
)
NO_CROSSING = (
    "Nothing to measure on {}: of the backends that run here, no two are chosen by the sizes of a "
    "call."
)


def width() -> int:
    """Columns to fill: 79, fewer on a narrower screen (or by COLUMNS), 40 at least."""
    return max(40, min(80, shutil.get_terminal_size().columns) - 1)


def parts(found: dict[str, Any]) -> list[str | Table]:
    """Paragraphs and tables, in the order in which they are printed."""
    versions = found["versions"]
    here = ", ".join(f"{name} {number}" for name, number in versions.items() if number)
    absent = ", ".join(name for name, number in versions.items() if not number)
    shown: list[str | Table] = [here, *([f"Not installed: {absent}"] if absent else [])]
    if "error" in found:
        return [*shown, f"JAX finds no device: {found['error']}"]
    driver = f"NVIDIA driver {found['driver']}" if found["driver"] else "no NVIDIA driver"
    shown.append(f"Devices: {', '.join(found['devices'])}; {driver}")
    if found["unmeasured"]:
        shown.append(UNMEASURED.format(", ".join(found["unmeasured"])))
    kernel = f"; the CPU kernel uses {found['kernel']}" if found["kernel"] else ""
    shown.append(f"Processor: {found['processor']}{kernel}")
    shown += [backends(found["backends"]), found["features"]["rows"], TYPES]
    shown += [f"{number}  {reason}" for number, reason in found["features"]["reasons"].items()]
    if check := found.get("check"):
        shown += ["Against the float64 oracle:", [list(check[0]), *map(_values, check)]]
    return shown


def backends(usable: dict[str, dict[str, list[str]]]) -> Table:
    """A row for each backend; the reasons of both frameworks together."""
    rows: Table = [("backend", "JAX", "torch", "why not")]
    for name, reasons in usable.items():
        why = dict.fromkeys(reason for place in reasons.values() for reason in place)
        marks = (_mark(reasons.get(place)) for place in ("jax", "torch"))
        rows.append((name, *marks, "; ".join(why)))
    return rows


def _mark(reasons: list[str] | None) -> str:
    return "-" if reasons is None else "no" if reasons else "yes"


def _values(row: dict[str, str]) -> list[str]:
    return list(row.values())


def replayed(found: dict[str, Any]) -> list[str | Table]:
    """A recorded call, and a row for each backend."""
    told = found["recorded"]
    batch, arrays = told["batch"], told["arrays"]
    shapes = (f"{name} {about['dtype']}{about['shape']}" for name, about in arrays.items())
    lens = f"query_lens {_short(batch['query_lens'])}, seq_lens {_short(batch['seq_lens'])}"
    written = {"options": told["options"], "spec": told["spec"]}
    unusual = ", ".join(f"{n}={x}" for of in written.values() for n, x in of.items() if x)
    machine = told["machine"]
    where = f"{', '.join(machine['devices'])}; {machine['processor']}"
    rows: Table = [("backend", "result", "us")]
    rows += [(r["backend"], r["result"], str(r["microseconds"] or "-")) for r in found["rows"]]
    return [
        f"A call of {told['framework']}: {', '.join(shapes)}; {lens}; {unusual}",
        f"Recorded by pagedattn {told['versions']['pagedattn']} on {where}, where backend=None "
        f"took {told['explain']['choice']}",
        rows,
    ]


def _short(lens: list[int]) -> str:
    return str(lens) if len(lens) <= MOST_LENS else f"{str(lens[:MOST_LENS])[:-1]}, ...]"


def tuned(found: dict[str, Any]) -> list[str | Table]:
    """The crossings of a machine, and the record that a program passes."""
    if not found["rows"]:
        return [NO_CROSSING.format(found["device"])]
    rows: Table = [("from here on", "it is", "instead of", "us, by size")]
    for row in found["rows"]:
        figure = "not measured: no time" if row["figure"] is None else row["figure"]
        figure = "never" if figure == NEVER else figure
        pairs = sorted(row["microseconds"].items())
        told = ", ".join(f"{size}: {ours}, {other}" for size, (ours, other) in pairs)
        rows.append((f"{row['field']} = {figure}", row["taken"], row["instead_of"], told))
    record = found["record"]
    return [
        f"Crossings of {found['device']}, in bfloat16:",
        rows,
        f"Pass it as paged_attention(..., backend={record}); select_backend and explain take it as "
        "crossings. What it does not name is as on an H200.",
    ]


def plain(shown: list[str | Table]) -> str:
    """The parts with aligned columns, long lines wrapped.

    >>> print(plain(["Some words.", [("a", "b"), ("long", "x")]]))
    Some words.
    <BLANKLINE>
    a     b
    long  x
    """
    return "\n\n".join(_paragraph(p) if isinstance(p, str) else _aligned(p) for p in shown)


def _paragraph(text: str) -> str:
    return textwrap.fill(text, width(), subsequent_indent="  ")


def _aligned(rows: Table) -> str:
    """Columns as wide as their widest entry; where they do not fit, the widest are wrapped."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    most = width()
    while sum(widths) + 2 * (len(widths) - 1) > most:
        widths[widths.index(max(widths))] -= 1
    return "\n".join(line for row in rows for line in _lines(row, widths))


def _lines(row: Sequence[str], widths: list[int]) -> list[str]:
    wrapped = [textwrap.wrap(text, width) or [""] for text, width in zip(row, widths, strict=True)]
    height = max(map(len, wrapped))
    columns = [column + [""] * (height - len(column)) for column in wrapped]
    lines = zip(*columns, strict=True)
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
