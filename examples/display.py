"""The engine at work, in a terminal: each request's progress and text, and who holds the pool."""

from engine import Engine
from occupancy import colour_of
from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from scheduler import FREE, Request, Sequence
from tokenizer import Tokenizer

TAIL = 60  # characters of each text shown


def render(engine: Engine, requests: list[Request], tokenizer: Tokenizer) -> Group:
    """The engine between two steps."""
    running = {sequence.request.id: sequence for sequence in engine.scheduler.running}
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for heading in ("request", "state", "tokens", "blocks", "text"):
        table.add_column(heading, no_wrap=True)
    for request in requests:
        table.add_row(*row_of(request, running.get(request.id), engine.completions, tokenizer))
    return Group(table, pool_of(engine))


def row_of(request: Request, sequence: Sequence | None, completions, tokenizer: Tokenizer) -> tuple:
    completion = sequence.completion if sequence else completions.get(request.id, [])
    done = request.id in completions
    state = "done" if done else "waiting" if not sequence else "decode" if completion else "prefill"
    cached = len(request.prompt) + len(completion) if done or completion else 0
    bar = ProgressBar(request.max_cached, sequence.num_cached if sequence else cached, width=16)
    blocks = str(len(sequence.blocks)) if sequence else ""
    text = tokenizer.decode([*request.prompt, *completion]).replace("\n", " ")
    name = Text(f"■ {request.id}", colour_of(request.id))
    return name, Text(state, "dim" if not sequence else ""), bar, blocks, Text(text[-TAIL:])


def pool_of(engine: Engine) -> Text:
    """A cell a block, in its owner's colour."""
    cells = ((" ·", "dim") if o == FREE else (" ■", colour_of(o)) for o in engine.scheduler.owners)
    return Text.assemble("\n pool", *cells, "\n")
