"""A model with windows in some layers: the same tokens from a pool that stays small."""

import pytest
import window_memory as example

pytestmark = pytest.mark.usefixtures("exact_products")


def test_windowed_layers_hold_few_blocks_and_give_the_same_tokens(capsys, monkeypatch):
    assert example.main(60) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "window 24: at most 16 blocks owned, 32 if all are kept"
    assert lines[1] == "window None: at most 32 blocks owned, 32 if all are kept"

    release_behind = example.pa.release_behind
    monkeypatch.setattr(example.pa, "release_behind", lambda pool, _: release_behind(pool, 2))
    example.run.clear_cache()
    assert example.main(60) == 1  # so the program notices
    example.run.clear_cache()
