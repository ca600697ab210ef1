"""Everything that the command knows, as plain data: what `--json` prints."""

from typing import Any

import jax

from . import machine
from .probe import probed
from .selfcheck import selfcheck
from .table import Cell, cells, grouped
from .usable import usable


def gather(*, check: bool) -> dict[str, Any]:
    """Versions, devices, backends, features, and the results of the self-check if it is asked for.

    Where JAX can start no device, `error` says why, and all that needs one is missing.
    """
    found: dict[str, Any] = {"versions": machine.versions(), "driver": machine.driver()}
    try:
        found["devices"] = machine.devices()
    except (AssertionError, RuntimeError) as error:  # JAX asserts where a plugin is not installed
        platforms = getattr(jax.config, "jax_platforms", None)
        return found | {"error": str(error) or f"JAX_PLATFORMS={platforms} has no plugin here"}
    found |= {"unmeasured": machine.unmeasured()}
    found |= {"processor": machine.processor(), "kernel": machine.kernel()}
    tried = probed(usable())
    found |= {"features": features(cells()), "backends": tried()}
    names = [name for name, reasons in found["backends"].items() if reasons.get("jax") == []]
    return found | ({"check": selfcheck(names)} if check else {})


def features(cells: list[Cell]) -> dict[str, Any]:
    rows, notes = grouped(cells)
    return {"rows": rows, "reasons": {str(number): reason for reason, number in notes.items()}}


def failures(found: dict[str, Any]) -> list[str]:
    """What a script should stop for: no device, or a backend that computes something else."""
    wrong = [row for row in found.get("check", ()) if row["result"].startswith("FAILED")]
    return [*([found["error"]] if "error" in found else []), *(row["result"] for row in wrong)]
