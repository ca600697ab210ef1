"""The committed pictures: what is drawn from the reports beside them, every contender named."""

import json
import runpy
import shutil
from pathlib import Path

import pytest
from benchmarks.plot import LOOKS, cpu_figure, gpu_figure, redraw, save_both

matplotlib = pytest.importorskip("matplotlib")

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"


def test_committed_pictures_are_those_of_the_reports(tmp_path):
    for report in RESULTS.glob("*.json"):
        shutil.copy(report, tmp_path)
    redraw(tmp_path)
    names = {path.name for path in tmp_path.glob("*.svg")}
    assert names == {path.name for path in RESULTS.glob("*.svg")}
    assert_same(tmp_path, RESULTS, names)


def test_the_drawing_of_blocks_and_tables_is_that_of_its_script(tmp_path):
    pytest.importorskip("rich")  # the script also serves the demo's requests
    script = runpy.run_path(str(DOCS / "pictures" / "draw.py"))
    save_both(tmp_path / "paging.svg", script["paging"])
    assert_same(tmp_path, DOCS / "pictures", {f"paging{look}.svg" for look in LOOKS})


def assert_same(drawn: Path, committed: Path, names: set[str]) -> None:
    """The same bytes, if the same matplotlib drew both."""
    for name in names:
        picture = (committed / name).read_bytes()
        if f"Matplotlib v{matplotlib.__version__}".encode() in picture:
            assert picture == (drawn / name).read_bytes()


@pytest.mark.parametrize(("name", "figure_of"), [("h200", gpu_figure), ("cpu", cpu_figure)])
def test_legends_name_every_contender(name, figure_of):
    """More of ours than there are colours, and a case that only some of them ran."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    new = [f"backend {index}" for index in range(9)]
    data["ours"] += new
    next(iter(data["cases"].values()))["us"] |= dict.fromkeys(new, 100.0)
    ours, others = (
        {text.get_text() for text in legend.get_texts()} for legend in figure_of(data).legends
    )
    assert ours == set(data["ours"])
    contenders = {name for row in data["cases"].values() for name in row["us"]}
    assert others == contenders - ours
