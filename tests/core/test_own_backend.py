"""The example of a backend that docs/architecture.md names: one short file, held to the oracle."""

from pathlib import Path

import own_backend

from pagedattn.testing import check_backend
from pagedattn.testing.features import OPTIONS


def test_it_is_short():
    assert len(Path(own_backend.__file__).read_text().splitlines()) <= 60


def test_it_agrees_with_the_oracle_and_refuses_what_it_does_not_support():
    cells = check_backend(own_backend.BACKEND, dtypes=["float32"], verbose=False)
    refused = {cell.feature for cell in cells if cell.result != "ok"}
    lacking = {"logits_soft_cap", "bias", "cache_dtype", "value_dim"}
    assert refused == {name for name, fields in OPTIONS.items() if lacking & set(fields)}
