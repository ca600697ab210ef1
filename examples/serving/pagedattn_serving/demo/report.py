"""The demo's report at the end: texts, speed, agreement, memory."""

import itertools
from dataclasses import dataclass
from pathlib import Path

from rich.box import HORIZONTALS
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.tokenizer import Tokenizer
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.demo.occupancy import Owners, blocks_padded, blocks_used, draw_occupancy
from pagedattn_serving.demo.parity import Scores, greedy, largest_difference

console = Console(markup=False)  # texts hold brackets: pip install 'pagedattn[ipex]'


@dataclass(frozen=True)
class Served:
    """The results of serving all requests with one backend."""

    completions: dict[int, list[int]]
    scores: Scores
    owners: Owners
    num_blocks: list[int]  # of each pool
    seconds: float
    num_preemptions: int
    num_hit_tokens: int  # tokens found in the prefix cache instead of computed


def show_texts(requests: list[Request], served: Served, tokenizer: Tokenizer) -> None:
    table = Table(title="Prompts, continued", box=HORIZONTALS, show_lines=True)
    table.add_column("#", justify="right")
    table.add_column("text")
    for request in requests:
        completion = served.completions[request.id]
        text = Text(tokenizer.decode(request.prompt), "bold cyan")
        table.add_row(str(request.id), text.append(tokenizer.decode(completion), "default"))
    console.print(table)


def show_backends(outcomes: dict[str, Served], dense: Scores) -> bool:
    """Prints speed and agreement; returns whether every text is the dense model's."""
    table = Table(title="Backends, beside one dense forward pass over each text")
    for heading in ("backend", "tokens/s", "steps", "text", "largest difference in logits"):
        table.add_column(heading, justify="right")
    same = {name: served.completions == greedy(dense) for name, served in outcomes.items()}
    for name, served in outcomes.items():
        speed = sum(map(len, served.completions.values())) / served.seconds
        verdict = Text("identical", "green") if same[name] else Text("differs", "red")
        difference = f"{largest_difference(served.scores, dense):.1e}"
        table.add_row(name, f"{speed:,.0f}", str(len(served.owners)), verdict, difference)
    console.print(table)
    for a, b in itertools.combinations(outcomes, 2):
        difference = largest_difference(outcomes[a].scores, outcomes[b].scores)
        console.print(f"Largest difference in logits between {a} and {b}: {difference:.1e}")
    return all(same.values())


def show_pool(served: Served, requests: list[Request], limits: Limits, picture: Path) -> None:
    """Prints peak use of the pool beside what padding would take, and draws the picture."""
    longest = limits.blocks_for(limits.max_seq_len) * len(served.num_blocks)
    used, padded = blocks_used(served.owners).max(), blocks_padded(served.owners, longest).max()
    console.print(
        f"Peak use: {used} of {sum(served.num_blocks)} blocks of {limits.block_size} tokens. With "
        f"every running request padded to the longest: {padded}; all {len(requests)} at once: "
        f"{longest * len(requests)}."
    )
    console.print(
        f"Preemptions: {served.num_preemptions}; {served.num_hit_tokens} tokens were found in the "
        "prefix cache instead of computed."
    )
    draw_occupancy(served.owners, longest, picture, served.num_blocks)
    console.print(f"Picture of the pool: {picture}")
