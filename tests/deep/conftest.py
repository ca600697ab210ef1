"""What takes long: `make test-deep`. Deselected otherwise, by the marker that all of it has."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.deep)
