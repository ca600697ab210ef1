"""The benchmarks' pictures: drawn from the reports beside them, with every contender named."""

import json
import shutil
from pathlib import Path

import matplotlib
import pytest
from benchmarks import chart, cpu_chart
from benchmarks.redraw import redraw

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_committed_pictures_are_those_of_the_reports(tmp_path):
    for report in RESULTS.glob("*.json"):
        shutil.copy(report, tmp_path)
    drawn = [
        Path(f"{light.with_suffix('')}{dark}.svg")
        for light in redraw(tmp_path)
        for dark in ("", "-dark")
    ]
    assert {path.name for path in drawn} == {path.name for path in RESULTS.glob("*.svg")}
    for path in drawn:
        committed = (RESULTS / path.name).read_bytes()
        if f"Matplotlib v{matplotlib.__version__}".encode() in committed:
            assert committed == path.read_bytes()


@pytest.mark.parametrize(("name", "plot"), [("h200", chart.plot), ("cpu", cpu_chart.plot)])
def test_legends_name_every_contender(name, plot):
    """More of ours than there are colours, and a case that only some of them ran."""
    data = json.loads((RESULTS / f"{name}.json").read_text())
    new = [f"backend {index}" for index in range(9)]
    data["ours"] += new
    next(iter(data["cases"].values()))["us"] |= dict.fromkeys(new, 100.0)
    ours, others = (
        {text.get_text() for text in legend.get_texts()} for legend in plot(data).legends
    )
    assert ours == set(data["ours"])
    contenders = {name for row in data["cases"].values() for name in row["us"]}
    assert others == contenders - ours
