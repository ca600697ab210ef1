"""`-k`: the work whose name contains a text."""

from argparse import ArgumentParser
from collections.abc import Iterable


def chosen(parser: ArgumentParser, only: str, names: Iterable[str]) -> list[str]:
    """The names that contain `only`; that there are none is an error of the arguments."""
    found = [name for name in names if only in name]
    return found or parser.error(f"nothing has a name that contains {only!r}")
