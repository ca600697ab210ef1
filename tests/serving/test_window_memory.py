"""A model with windows in some layers: the same tokens from a pool that stays small."""

import pytest
import window_memory

from pagedattn import release_behind

pytestmark = pytest.mark.usefixtures("exact_products")


def test_windowed_layers_hold_few_blocks_and_give_the_same_tokens(capsys, monkeypatch, tmp_path):
    picture = tmp_path / "windows.png"
    assert window_memory.main(["--new-tokens", "60", "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    held = [line.split()[-2] for line in lines if line.startswith("Caches")]
    assert held == ["164", "164", "66", "164"]  # 40 blocks a layer; 16 of those with a window

    monkeypatch.setattr(window_memory, "release_behind", lambda pool, _: release_behind(pool, 2))
    kept, *_ = window_memory.run(60, gives_back=False)
    window_memory.generate.clear_cache()
    too_few, *_ = window_memory.run(60, gives_back=True)
    assert (kept != too_few).any()  # so the program would notice
