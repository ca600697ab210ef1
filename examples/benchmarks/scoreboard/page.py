"""The page of the docs, written from the answers alone."""

from benchmarks.scoreboard.ask import PEERS
from benchmarks.scoreboard.cells import COLUMNS, OTHERS, Cell

MARKS = {
    "right": "+",
    "wrong": "x",
    "refused": "r",
    "crashed": "!",
    "not offered": ".",
    "not asked": "?",
}
HEAD = """\
# Scoreboard

What other people's kernels compute of the calls that [this library defines](semantics.md), and
whether it is right. The page is written from [one file](results/scoreboard.json) by

    PYTHONPATH=examples python -m benchmarks.scoreboard \\
        --json docs/results/scoreboard.json --page docs/scoreboard.md

which asks every peer that is installed, in a process of its own, and leaves the answers of other
machines in the file. On a machine with a GPU, name the peers that need one.

A cell is a call: an option, in a phase of a decoder or with another type of attention, in bfloat16
unless it says otherwise, with heads of 128 columns, four query heads to a KV head, and pages of
32. It is asked of a peer only if its interface has an argument for all that the cell needs. An
answer is right if it is within [the rule](semantics.md#precision) of the float64 oracle; rows that
see no key, of which few promise anything, are left out. So it is judged:

```python
from pagedattn import AttentionSpec
from pagedattn.testing import assert_attention_close, attend, random_problem

sizes = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 128, "block_size": 32}
window = AttentionSpec(sliding_window=5)
problem = random_problem([6, 2], [131, 33], window, **sizes, dtype="bfloat16", poison=None)
out, _ = attend(problem, backend=None)  # a peer's answer stands here
assert_attention_close(out, None, problem)
```

## Cells

"""
LEGEND = """\
`+` right, `x` wrong, `r` refused by an error, `!` the process ended, `.` not offered, `?` not
asked yet. The six marks are, in their order: {columns}. `parents` have
the first four: drafts that branch are causal. `cache_dtype` is a cache of 8 bits with
one scale for all keys and one for all values; `lse` is the logarithm of the sum of exponentials,
which is float32 here. The last two rows are asked of all who have pages: engines meet them, but
few interfaces promise anything. NaN in unused slots does no harm where the engine clears its
caches.
"""


def page(found: dict) -> str:
    peers = {name: found["peers"][name] for name in PEERS if name in found["peers"]}
    columns = ", ".join(COLUMNS)
    parts = [HEAD + table(peers), LEGEND.format(columns=columns), "## Peers\n"]
    parts += [section(name, about) for name, about in peers.items()]
    if absent := [name for name in PEERS if name not in peers]:
        parts.append(f"Not asked yet: {', '.join(absent)}.\n")
    return "\n".join(parts)


def table(peers: dict) -> str:
    """A row for each option, a column for each peer, a mark for each cell."""
    lines = [f"| | {' | '.join(peers)} |", f"|---|{'---|' * len(peers)}"]
    for row in next(iter(peers.values()))["rows"]:
        marks = (f"`{''.join(map(mark, about['rows'][row].values()))}`" for about in peers.values())
        named = row if row in OTHERS else f"`{row}`"
        lines.append(f"| {named} | {' | '.join(marks)} |")
    return "\n".join([*lines, ""])


def mark(result: str) -> str:
    return MARKS[kind(result)]


def kind(result: str) -> str:
    return result.partition(":")[0]


def section(name: str, about: dict) -> str:
    """What was asked, on what, and each answer that needs a word."""
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    lines = [f"### {name}", "", f"{PEERS[name].about}."]
    lines += ["", f"{about['machine']}, {about['date']}; {versions}."]
    told = [line for row, results in about["rows"].items() for line in failures(name, row, results)]
    return "\n".join([*lines, *([""] if told else []), *told, ""])


def failures(name: str, row: str, results: dict[str, str]) -> list[str]:
    """One line for each kind of answer in a row that needs a word: where, and the first."""
    columns: dict[str, list[str]] = {}
    for column, result in results.items():
        if tells(name, Cell(row, column), result):
            columns.setdefault(kind(result), []).append(column)
    return [f"- {row}, {', '.join(where)}: `{results[where[0]]}`" for where in columns.values()]


def tells(name: str, cell: Cell, result: str) -> bool:
    """Whether an answer is not right, or why it is not offered is more than a missing argument."""
    if kind(result) == "not offered":
        return result == f"not offered: {PEERS[name].lacks(cell)}"
    return kind(result) not in ("right", "not asked")
