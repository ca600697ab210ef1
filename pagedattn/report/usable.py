"""Which backends are usable on a machine, and what installs the others."""

import dataclasses
import sys

from .._dispatch import registry, select
from .._dispatch.call import Call, call_of
from .._dispatch.registry import Framework
from .table import call, request


def usable() -> dict[str, dict[str, list[str]]]:
    """For each backend: for JAX arrays and torch tensors, why it cannot run a plain decode.

    No reasons mean that it can. A backend that a framework does not have is left out there.
    """
    places = {Framework.JAX: plain_decode(), Framework.TORCH: on_torch(plain_decode())}
    names = dict.fromkeys(name for place in places for name in registry.names(place))
    return {
        name: {
            place.name.lower(): select.why_not(name, asked, place)
            for place, asked in places.items()
            if name in registry.names(place)
        }
        for name in names
    }


def plain_decode() -> Call:
    return call_of(*call(request("plain", "decoder")))


def on_torch(asked: Call) -> Call:
    """The same call on the device that torch would use."""
    if not registry.can_load("sdpa", Framework.TORCH):
        return asked
    torch = sys.modules["torch"]  # loaded by sdpa
    devices = [name for name in ("cuda", "xpu") if getattr(torch, name).is_available()]
    return dataclasses.replace(asked, device=[*devices, "cpu"][0])
