"""The engine at work, in a terminal: each request's progress and text, and who holds the pool."""

from engine import Engine
from occupancy import colour_of
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from scheduler import FREE, Request, Sequence
from tokenizer import Tokenizer

TAIL = 36  # characters of each text shown
WIDTHS = {"request": 7, "state": 7, "progress": 12, "blocks": 6, "text": TAIL}


def render(engine: Engine, requests: list[Request], tokenizer: Tokenizer) -> Group:
    """The engine between two steps."""
    running = {sequence.request.id: sequence for sequence in engine.scheduler.running}
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for heading, width in WIDTHS.items():
        table.add_column(heading, width=width, no_wrap=True)
    for request in requests:
        sequence = running.get(request.id)
        completion = sequence.completion if sequence else engine.completions.get(request.id)
        table.add_row(*row_of(request, sequence, completion, tokenizer))
    return Group(table, pool_of(engine))


def row_of(
    request: Request,
    sequence: Sequence | None,
    completion: list[int] | None,
    tokenizer: Tokenizer,
) -> tuple:
    """A request is waiting (neither a sequence nor a completion), running or done."""
    name = Text(f"■ {request.id}", colour_of(request.id))
    text = tokenizer.decode([*request.prompt, *(completion or [])])
    tail = Text(" ".join(text.split())[-TAIL:])
    if sequence:
        state = "decode" if completion else "prefill"
        bar = ProgressBar(request.max_cached, sequence.num_cached)
        return name, state, bar, str(len(sequence.blocks)), tail
    state, progress = ("waiting", 0) if completion is None else ("done", 1)
    return name, Text(state, "dim"), ProgressBar(1, progress), "", tail


def pool_of(engine: Engine) -> Text:
    """A cell a block, in its owner's colour."""
    owners = engine.scheduler.owners
    cells = (("·", "dim") if owner == FREE else ("■", colour_of(owner)) for owner in owners)
    return Text.assemble("\n", *cells)
