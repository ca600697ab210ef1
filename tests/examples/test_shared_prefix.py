"""The comparison of attention with and without a shared prefix."""

import pytest

pytest.importorskip("rich")

import shared_prefix


def test_both_programs_run_and_agree(capsys):
    sizes = "--seqs 3 --prefix 32 --suffix 5 --heads 4 2 --head-dim 16 --repeats 2"
    seconds = shared_prefix.main(sizes.split())
    assert set(seconds) == {"paged_attention", "cascade_attention"}
    printed = capsys.readouterr().out
    assert "3 sequences over 32 shared tokens" in printed
    gap = float(printed.partition("largest difference ")[2].split(",")[0])
    assert gap < 0.02  # of values near 1, in bfloat16
