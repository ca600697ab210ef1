"""The messages of a chat, read from a request's JSON."""

from typing import Any

from pagedattn_serving.server.refusal import invalid
from pagedattn_serving.server.values import kind, string

ROLES = ("system", "developer", "user", "assistant", "tool")


def read_messages(name: str, value: Any) -> tuple[dict, ...]:
    if not isinstance(value, list) or not value:
        raise invalid(name, "expected a list of messages")
    return tuple(_message(f"{name}[{index}]", each) for index, each in enumerate(value))


def _message(name: str, value: Any) -> dict:
    if not isinstance(value, dict):
        raise invalid(name, f"expected an object, got {kind(value)}")
    for key in value.keys() - {"role", "content", "name"}:
        if value[key] not in (None, []):  # as in answers that are sent back
            raise invalid(f"{name}.{key[:80]}", "not passed to this model", "unsupported_parameter")
    role = string(f"{name}.role", value.get("role"))
    if role not in ROLES:
        raise invalid(f"{name}.role", f"expected one of {', '.join(ROLES)}")
    named = {"name": string(f"{name}.name", value["name"])} if value.get("name") else {}
    return {"role": role, "content": _content(f"{name}.content", value.get("content")), **named}


def _content(name: str, value: Any) -> str:
    """A text, or parts of one."""
    if not isinstance(value, list):
        return string(name, value)
    for index, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise invalid(f"{name}[{index}]", "expected a part of type text")
    return "".join(string(f"{name}[{i}].text", part.get("text")) for i, part in enumerate(value))
