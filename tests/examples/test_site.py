"""The hook that keeps the site whole without a network."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
HOOK = runpy.run_path(str(DOCS / "offline.py"))


@pytest.mark.parametrize(
    ("page", "found"),
    [
        ('<script src="https://a.org/x.js"></script>', ["https://a.org/x.js"]),
        ('<script src=//a.org/x.js></script><script src="x.js"></script>', ["//a.org/x.js"]),
        ('<link rel="stylesheet" href="https://a.org/x.css">', ["https://a.org/x.css"]),
        ('<link rel="preload stylesheet" as="font" href="http://a.org/f">', ["http://a.org/f"]),
        ('<link rel="canonical" href="https://a.org/">', []),
        ('<a href="https://a.org/">there</a> loads https://a.org/', []),
        ('<img src="https://a.org/x.svg"><img src="../x.svg">', ["https://a.org/x.svg"]),
        ("<style>p {} @import 'https://a.org/x.css';</style>", ["https://a.org/x.css"]),
        ("<style>@font-face {src: url(//a.org/f)}</style>", ["//a.org/f"]),
        ("<p>url(https://a.org/x)</p><style>p {}</style>", []),
        ('<p style="background: url(https://a.org/x)">', ["https://a.org/x"]),
        ('<pre class="mermaid"><code>flowchart LR</code></pre>', ["Mermaid"]),
    ],
)
def test_what_a_page_loads_from_elsewhere_is_found(page, found):
    assert HOOK["Loads"](page).found == found


def test_no_page_has_a_diagram_that_needs_a_script():
    assert not [page for page in DOCS.rglob("*.md") if "```mermaid" in page.read_text()]
