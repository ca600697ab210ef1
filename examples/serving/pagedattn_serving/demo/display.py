"""A live display of the engine: each request's progress and text, and the owner of each block."""

from rich.console import Group as Rows
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pagedattn_serving.checkpoint.tokenizer import Tokenizer
from pagedattn_serving.decoding.request import Group, Request
from pagedattn_serving.demo.occupancy import colour_of
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.owners import CACHED, FREE

TAIL = 36  # characters of each text shown
WIDTHS = {"request": 7, "state": 7, "progress": 12, "blocks": 6, "text": TAIL}


def render(engine: Engine, requests: list[Request], tokenizer: Tokenizer) -> Rows:
    """The display of the engine as it is now."""
    running = {group.request.id: group for group in engine.scheduler.running}
    table = Table(box=None, header_style="dim", padding=(0, 1))
    for heading, width in WIDTHS.items():
        table.add_column(heading, width=width, no_wrap=True)
    for request in requests:
        group = running.get(request.id)
        table.add_row(*row_of(engine, request, group, tokenizer))
    return Rows(table, pool_of(engine))


def row_of(engine: Engine, request: Request, group: Group | None, tokenizer: Tokenizer) -> tuple:
    """A row: the request is running (it has a group), done (it has completions) or waiting."""
    name = Text(f"■ {request.id}", colour_of(request.id))
    if group and group.sequences:  # may be empty: the display runs in a thread beside the engine
        first = group.sequences[0]
        bar = ProgressBar(request.max_cached, first.num_cached)
        blocks = sum(engine.memory.most(s.num_cached) for s in group.sequences)
        state = "decode" if group.completion(first) else "prefill"
        known = first.tokens[: first.num_known]
        return name, state, bar, str(blocks), tail_of(known, tokenizer)
    completions = engine.completions.get(request.id)
    state, progress = ("done", 1) if completions else ("waiting", 0)
    tokens = [*request.prompt, *(completions[0] if completions else [])]
    return name, Text(state, "dim"), ProgressBar(1, progress), "", tail_of(tokens, tokenizer)


def tail_of(tokens: list[int], tokenizer: Tokenizer) -> Text:
    return Text(" ".join(tokenizer.decode(tokens).split())[-TAIL:])


def pool_of(engine: Engine) -> Text:
    """A cell a block, in its owner's colour."""
    look = {FREE: ("·", "dim"), CACHED: ("□", "dim")}
    cells = (look.get(owner) or ("■", colour_of(owner)) for owner in engine.owners().tolist())
    return Text.assemble("\n", *cells)
