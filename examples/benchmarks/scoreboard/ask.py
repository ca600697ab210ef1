"""A peer's answers: each of its cells in turn, in a process of its own."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.scoreboard.cells import Cell, cells, needs, problem_of
from benchmarks.scoreboard.dense import DENSE
from benchmarks.scoreboard.flash import FLASH
from benchmarks.scoreboard.flashinfer import FLASHINFER
from benchmarks.scoreboard.ours import OURS
from benchmarks.scoreboard.pallas import PALLAS
from benchmarks.scoreboard.peer import Peer
from benchmarks.scoreboard.vllm_cpu import VLLM
from pagedattn.testing import assert_attention_close, expect

PEERS: dict[str, Peer] = OURS | FLASH | FLASHINFER | VLLM | PALLAS | DENSE
SECONDS = 300  # for one cell: some compile at their first call
LONGEST = 160  # characters of a reason that are kept


def not_offered(peer: Peer, cell: Cell) -> str | None:
    """What the peer has no argument for; None if the cell may be asked."""
    absent = [need for need in needs(cell) if need not in peer.takes]
    if absent:
        return f"not offered: {', '.join(absent)}"
    reason = peer.lacks(cell)
    return None if reason is None else f"not offered: {reason}"


def answer(peer: Peer, cell: Cell) -> str:
    """ "right", "wrong: ..." or "refused: ...": what the peer makes of a cell that it offers."""
    problem = problem_of(cell)
    try:
        out, lse = peer.attend(problem)
    except Exception as error:  # foreign code can raise anything
        return short(f"refused: {type(error).__name__}: {str(error).strip()}")
    if cell.row == "lse" and lse is None:
        return "refused: it gave no lse"
    expected = expect(problem)
    out = np.where(
        np.isneginf(expected.lse)[..., None], 0, np.asarray(out)
    )  # nobody promises these
    try:
        assert_attention_close(out, lse if cell.row == "lse" else None, expected, name="it")
    except AssertionError as error:
        return short(f"wrong: {str(error).removeprefix('it: ')}")
    return "right"


def up_to_date(name: str, rows: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """The answers of another time as cells of today; what it was never asked is told as such."""
    found: dict[str, dict[str, str]] = {}
    for cell in cells():
        kept = rows.get(cell.row, {}).get(cell.column, "")
        if kept.startswith("not "):
            kept = ""
        result = not_offered(PEERS[name], cell) or kept or "not asked"
        found.setdefault(cell.row, {})[cell.column] = result
    return found


def short(reason: str) -> str:
    """The first line, as long as a page has room for."""
    first = reason.splitlines()[0]
    return first if len(first) <= LONGEST else first[: LONGEST - 3] + "..."


def answers(name: str, told: Callable[[Cell, str], None] = lambda cell, result: None) -> dict:
    """All answers of a peer: row -> column -> result. A call that ends its process is one, too."""
    found: dict[str, dict[str, str]] = {}
    left = []
    for cell in cells():
        reason = not_offered(PEERS[name], cell)
        found.setdefault(cell.row, {})[cell.column] = reason or ""
        left += [] if reason else [cell]
    while left:
        for cell, result in _from_process(name, left):
            found[cell.row][cell.column] = result
            left.remove(cell)
            told(cell, result)
    return found


def _from_process(name: str, left: list[Cell]) -> Iterator[tuple[Cell, str]]:
    """Answers as they come; after a crash that of the cell that was asked last."""
    command = [sys.executable, "-m", "benchmarks.scoreboard.ask", name]
    on_cpu = {"JAX_PLATFORMS": "cpu"} if PEERS[name].device == "cpu" else {}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, json.dumps(left)], env=os.environ | on_cpu, **pipes)
    waiting = list(left)
    try:
        printed, errors = process.communicate(timeout=SECONDS + 10 * len(left))
    except subprocess.TimeoutExpired:
        process.kill()
        printed, errors = process.communicate()
    for line in printed.splitlines():
        if line.startswith(MARK):
            yield waiting.pop(0), json.loads(line.removeprefix(MARK))
    if waiting:
        yield waiting[0], short(f"crashed: {_end(process.returncode, errors)}")


def _end(code: int, errors: str) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"status {code}, {(errors.strip().splitlines() or [''])[-1]}"


MARK = "answer: "  # peers print, too

if __name__ == "__main__":
    for cell in json.loads(sys.argv[2]):
        print(MARK + json.dumps(answer(PEERS[sys.argv[1]], Cell(*cell))), flush=True)
