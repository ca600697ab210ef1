"""The backend that docs/backend-authors.md walks through: one short file, held to the oracle."""

import re
from pathlib import Path

import own_backend

from pagedattn.testing import check_backend
from pagedattn.testing.features import OPTIONS


def test_it_is_short():
    assert len(Path(own_backend.__file__).read_text().splitlines()) <= 60


def test_the_page_shows_all_of_it():
    page = (Path(__file__).parents[2] / "docs" / "backend-authors.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    code = Path(own_backend.__file__).read_text().partition("type=false\n")[2]
    shown = [block for block in blocks if block in code]
    assert "".join(shown).split() == code.split()


def test_it_agrees_with_the_oracle_and_refuses_what_it_does_not_support(capsys):
    cells = check_backend(own_backend.BACKEND, dtypes=["float32"])
    last = capsys.readouterr().out.splitlines()[-1]
    right = sum(cell.result == "ok" for cell in cells)
    assert last == f"{right} ok, {len(cells) - right} refused, 0 FAILED"
    refused = {cell.feature for cell in cells if cell.result != "ok"}
    lacking = {"logits_soft_cap", "bias", "cache_dtype", "value_dim", "selection", "parents"}
    assert refused == {name for name, fields in OPTIONS.items() if lacking & set(fields)}
