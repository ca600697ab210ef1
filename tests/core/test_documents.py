"""What the pages say stands on the code: paths exist, tables are those of the code."""

import re
from pathlib import Path

import pytest

from pagedattn import registry
from pagedattn.backend import AROUND
from pagedattn.registry import Framework, can_load, load

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
PLACES = ("", "pagedattn/", "pagedattn_torch/", "tests/", "examples/", "docs/")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_pages_name_exist(page):
    named = re.findall(r"`([\w./-]+\.(?:py|md|json|toml))`", page.read_text())
    links = re.findall(r"\]\(([\w./-]+)[)#]", page.read_text())
    missing = [name for name in named if not any((ROOT / p / name).exists() for p in PLACES)]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert not missing


def records() -> dict:
    """The records of the backends that can be loaded here."""
    table = registry.BUILT_IN.items()
    places = {name: Framework.TORCH if where.torch else Framework.JAX for name, where in table}
    return {name: load(name, place) for name, place in places.items() if can_load(name, place)}


def table_of(page: Path, corner: str) -> dict[str, dict[str, str]]:
    """The table of a page that has a word in its corner: row -> column -> text."""
    lines = [line.strip("|").split("|") for line in page.read_text().splitlines()]
    cells = [[cell.strip(" `") for cell in line] for line in lines]
    first = next(i for i, row in enumerate(cells) if row[0] == corner)
    last = next(i for i in range(first, len(cells)) if len(cells[i]) == 1)
    header = cells[first]
    rows = cells[first + 2 : last]
    return {row[0].split("`")[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_the_table_of_options_is_that_of_the_records():
    table = table_of(ROOT / "docs" / "backends.md", "option")
    assert {"xla", "sdpa"} <= set(records())
    for name, record in records().items():
        said = {option: row[name] for option, row in table.items()}
        assert record.honours == {o for o, text in said.items() if text not in ("no", "around it")}
        around = {option for option, by in AROUND.items() if by in record.honours} - record.honours
        assert around == {option for option, text in said.items() if text == "around it"}
