"""What the pages say stands on the code: code runs, paths exist, tables are those of the code."""

import importlib
import re
from contextlib import suppress
from inspect import ismodule
from pathlib import Path

import pytest

from pagedattn import BackendUnavailableError
from pagedattn._dispatch import registry
from pagedattn._dispatch.options import AROUND
from pagedattn._dispatch.registry import Framework

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
WITH_CODE = [page for page in PAGES if CODE.search(page.read_text())]
PACKAGES = (
    "pagedattn",
    "pagedattn.extend",
    "pagedattn.testing",
    "pagedattn_torch",
    "pagedattn_interop",
)
# The versions that the extras ask for; what a machine has otherwise may be older.
LEAST = dict(
    re.findall(r'^  "(\w+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
)
PLACES = ("", "pagedattn/", "pagedattn_torch/", "tests/", "examples/", "docs/")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_code_of_pages_runs(page, request):
    """The blocks of a page in their order, in one namespace."""
    text, namespace = page.read_text(), {"__name__": page.stem}
    for package, least in LEAST.items():
        if re.search(rf"^(from|import) {package}\b", text, re.MULTILINE):
            pytest.importorskip(package, minversion=least)
    if "jax.devices()" not in text:  # its arrays lie on all devices
        request.getfixturevalue("on_cpu")
    try:
        for block in CODE.finditer(text):
            above = "\n" * text.count("\n", 0, block.start(1))  # so that tracebacks name the line
            exec(compile(above + block[1], str(page), "exec"), namespace)
    except ImportError as error:  # a package is not installed, unless a name is missing in one
        if type(error) is ImportError or (error.name or "").startswith("pagedattn"):
            raise
        pytest.skip(str(error))


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_has_every_public_name(package):
    text = "\n".join(page.read_text() for page in DOCS.glob("api/*.md"))
    shown = set(re.findall(rf"^::: {package}\.(?:\w+\.)*(\w+)$", text, re.MULTILINE))
    names = vars(importlib.import_module(package)).items()
    public = {n for n, v in names if not n.startswith("_") and not ismodule(v)}
    assert public <= shown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_pages_name_exist(page):
    named = re.findall(r"`([\w./-]+\.(?:py|md|json|toml))`", page.read_text())
    links = re.findall(r"(?:\]\(|src=\"|srcset=\")([\w./-]+)[)#\"]", page.read_text())
    missing = [name for name in named if not any((ROOT / p / name).exists() for p in PLACES)]
    missing += [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_headings_that_pages_link_to_exist(page):
    links = re.findall(r"\]\(([\w./-]*)#([\w-]+)\)", page.read_text())
    pages = {(page.parent / path if path else page, anchor) for path, anchor in links}
    assert not [
        (path, anchor)
        for path, anchor in pages
        if path.suffix == ".md" and anchor not in anchors(path)
    ]


def anchors(page: Path) -> set[str]:
    """The names of a page's headings in links, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def records() -> dict:
    """The records of the backends, also of those that cannot run here, but for missing imports."""
    found = {}
    for name, where in registry.BUILT_IN.items():
        with suppress(BackendUnavailableError):
            found[name] = registry.record(name, Framework.TORCH if where.torch else Framework.JAX)
    return found


def table_of(page: Path, corner: str) -> dict[str, dict[str, str]]:
    """The table of a page that has a word in its corner: row -> column -> text."""
    lines = [line.strip("|").split("|") for line in page.read_text().splitlines()]
    cells = [[cell.strip(" `") for cell in line] for line in lines]
    first = next(i for i, row in enumerate(cells) if row[0] == corner)
    last = next(i for i in range(first, len(cells)) if len(cells[i]) == 1)
    header = cells[first]
    rows = cells[first + 2 : last]
    return {row[0].split("`")[0]: dict(zip(header, row, strict=True)) for row in rows}


@pytest.mark.parametrize("page", ["docs/backends.md", "README.md"])
def test_backends_are_those_of_the_registry(page):
    assert set(table_of(ROOT / page, "backend")) == set(registry.BUILT_IN)


def test_every_backend_has_its_extra_and_its_section():
    text = (DOCS / "backends.md").read_text()
    table = table_of(DOCS / "backends.md", "backend")
    for name, where in registry.BUILT_IN.items():
        assert f"\n## {name}\n" in text
        assert table[name]["extra"] in (where.extra, "")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_order_of_choice_is_that_of_the_registry(device):
    line = re.search(rf"^- {device}: ([^.]*)\.", (DOCS / "backends.md").read_text(), re.I | re.M)
    assert line
    expected = [name for name in registry.BUILT_IN if not registry.wrong_device(name, device)]
    assert re.findall(r"`(\w+)`", line[1]) == expected


def test_the_options_that_a_backend_lacks_are_those_of_its_record():
    """What it supports, or what the library does around it, it does not lack."""
    table = table_of(DOCS / "backends.md", "backend")
    assert {"xla", "sdpa"} <= set(records())
    every = {*AROUND, *(option for record in records().values() for option in record.supports)}
    for name, record in records().items():
        around = {o for o, by in AROUND.items() if by.needs in {None, *record.supports}}
        lacks = re.findall(r"\w+", table[name]["options that it lacks"])
        assert set(lacks) == every - record.supports - around, name
