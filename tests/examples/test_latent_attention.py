"""The layer of latent attention: paged with absorbed projections, it equals the plain one."""

import latent_attention
import pytest

pytestmark = pytest.mark.usefixtures("exact_products")


@pytest.mark.parametrize("backend", ["xla", "sdpa"])
def test_absorbed_equals_plain(backend, monkeypatch, capsys):
    """And the program notices if it does not."""
    assert latent_attention.main(backend) == 0
    assert "40 columns in place of 160" in capsys.readouterr().out
    plain = latent_attention.plain
    monkeypatch.setattr(latent_attention, "plain", lambda w, x: 1.001 * plain(w, x))
    assert latent_attention.main(backend) == 1
