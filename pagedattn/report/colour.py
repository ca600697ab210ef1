"""The report by rich, in colours where the screen has them."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import text

STYLES = {"yes": "green", "no": "red", "ok": "green"}


def coloured(shown: list[str | text.Table]) -> str:
    """The parts as text. Nothing in it is markup: `pagedattn[ipex]` stays as it is."""
    console = Console(width=text.width(), markup=False, highlight=False)
    with console.capture() as captured:
        for part in shown:
            console.print(part if isinstance(part, str) else table(part))
    return captured.get()


def table(rows: text.Table) -> Table:
    made = Table(*rows[0], box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for row in rows[1:]:
        made.add_row(*(Text(entry, STYLES.get(entry.split(" ")[0], "")) for entry in row))
    return made
