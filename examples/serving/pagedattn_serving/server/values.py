"""One value of a request's JSON: read as what it should be, or refused by its parameter's name."""

from collections.abc import Callable
from typing import Any

from pagedattn_serving.server.refusal import invalid

Read = Callable[[str, Any], Any]


def whole(least: int, most: int | None = None) -> Read:
    """Integers in a range; an end of None is none."""

    def read(name: str, value: Any) -> int:
        wanted = f"from {least} to {most}" if most is not None else f"from {least} up"
        if type(value) is not int:
            raise invalid(name, f"expected an integer, got {kind(value)}")
        if value < least or (most is not None and value > most):
            raise invalid(name, f"expected an integer {wanted}, got {str(value)[:40]}")
        return value

    return read


def number(least: float, most: float, open_below: bool = False) -> Read:
    """Numbers in a range, without its lower end if that is open."""

    def read(name: str, value: Any) -> float:
        if type(value) not in (int, float):
            raise invalid(name, f"expected a number, got {kind(value)}")
        inside = least < value <= most if open_below else least <= value <= most
        if not inside:  # as NaN is
            bound = "above" if open_below else "from"
            got = str(value)[:40]
            raise invalid(name, f"expected a number {bound} {least} to {most}, got {got}")
        return float(value)

    return read


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(name, f"expected true or false, got {kind(value)}")
    return value


def string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise invalid(name, f"expected a string, got {kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:  # "\ud800" is JSON, and no text
        raise invalid(name, "expected text, got half of a surrogate pair") from error
    return value


def kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    return names.get(type(value), "null" if value is None else "a number")
