"""The tables of figures on the pages: those of the committed reports."""

import re
from pathlib import Path

import pytest
from benchmarks.tables import TABLES, rewritten

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {path.name: path.read_text() for path in DOCS.glob("*.md")}
MARKED = {
    name: re.findall(r"^<!-- (\S+\.json.*) -->$", PAGES[name], re.MULTILINE) for name in PAGES
}


def test_every_table_stands_on_one_page():
    assert sorted(name for names in MARKED.values() for name in names) == sorted(TABLES)


@pytest.mark.parametrize("name", [name for name, marks in MARKED.items() if marks])
def test_tables_of_figures_are_those_of_the_reports(name):
    page = PAGES[name]
    assert page == rewritten(page, DOCS / "results")
    damaged = re.sub(r"(<!-- .* -->\n\n.*\n.*\n.*\|) [^|]* \|\n", r"\1 9.99 |\n", page)
    assert damaged != page
    assert page == rewritten(damaged, DOCS / "results")


def test_a_figure_is_that_of_its_report():
    assert "| decode 64 x 4096 | 4.27 | 4.32 | 4.30 |" in PAGES["performance.md"]
