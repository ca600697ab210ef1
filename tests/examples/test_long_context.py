"""Few chosen blocks often agree with dense attention, more of them more often, and all always."""

import re

import pytest

pytest.importorskip("matplotlib")

import long_context


def test_agreement_grows_with_the_budget(capsys, tmp_path):
    picture = tmp_path / "chosen.png"
    assert long_context.main(str(picture), prompt=300, steps=12) == 0
    shares = [float(share) for share in re.findall(r"([\d.]+)% are alike", capsys.readouterr().out)]
    assert len(shares) == 5
    assert 50 < shares[0] < shares[-2] <= shares[-1] == 100
    assert picture.read_bytes().startswith(b"\x89PNG")
