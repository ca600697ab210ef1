"""The example engine's package: imports go one way between its rooms, and its commands exist."""

import ast
import importlib
import tomllib
from pathlib import Path

import pagedattn_serving
import pytest

ROOT = Path(pagedattn_serving.__file__).parent
# Each may import from those before it.
ROOMS = ["families", "checkpoint", "blocks", "decoding", "engine", "parallel"]
ROOMS += ["server", "replicas", "training", "demo"]
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]


def imported_rooms(path):
    """The rooms that a file imports from, at any depth of its code."""
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    modules = [node.module.split(".") for node in nodes if node.module and not node.level]
    return {parts[1] for parts in modules if parts[0] == ROOT.name}


def test_every_folder_is_a_known_room():
    assert {path.parent.name for path in ROOT.glob("*/*.py")} == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_one_way(room):
    before = set(ROOMS[: ROOMS.index(room) + 1])
    later = {path.name: imported_rooms(path) - before for path in (ROOT / room).glob("*.py")}
    assert not {name: rooms for name, rooms in later.items() if rooms}


@pytest.mark.parametrize("command", PROJECT["scripts"])
def test_commands_lead_to_functions(command):
    pytest.importorskip("starlette")
    module, _, name = PROJECT["scripts"][command].partition(":")
    assert callable(getattr(importlib.import_module(module), name))


def test_what_comes_with_it_is_inside_its_package():
    """So that the command finds its model wherever it is installed."""
    from pagedattn_serving.checkpoint.folder import SHIPPED

    assert SHIPPED.is_relative_to(ROOT)
    assert (SHIPPED / "config.json").is_file()
