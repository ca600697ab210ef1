"""One tiny call by each backend, in a process of its own: some faults end a process.

    python -m pagedattn.report.probe BACKEND FRAMEWORK ...

prints, as JSON, why each framework's call failed; null where it did not.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

from ..cache.kv_cache import KVCache
from .table import call, request

SECONDS = 240  # the first call of a new installation compiles; half a minute is usual
Reasons = dict[str, dict[str, list[str]]]


def probed(usable: Reasons) -> Callable[[], Reasons]:
    """Starts the probes of all backends that seem usable; the result waits for what they found."""
    asked = {name: [f for f, why in places.items() if not why] for name, places in usable.items()}
    running = {name: _started(name, places) for name, places in asked.items() if places}
    return lambda: (
        usable
        | {name: usable[name] | _outcome(process, asked[name]) for name, process in running.items()}
    )


def _started(name: str, places: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "pagedattn.report.probe", name, *places]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # they share a GPU
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=pipe)


def _outcome(process: subprocess.Popen, places: list[str]) -> dict[str, list[str]]:
    """Why each framework's call failed; an empty list where it did not."""
    try:
        printed, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {place: [f"a tiny call gave no result in {SECONDS} s"] for place in places}
    lines = printed.splitlines()
    found = json.loads(lines[-1]) if lines and process.returncode == 0 else {}
    end = _end(process.returncode, errors)
    return {place: [why] if (why := found.get(place, end)) else [] for place in places}


def _end(code: int, errors: str) -> str:
    if code < 0:
        return f"a tiny call ended its process by {signal.Signals(-code).name}"
    last = (errors.strip().splitlines() or [""])[-1]
    return f"a tiny call ended its process with status {code}: {last}"


def why_not(name: str, framework: str) -> str | None:
    """Computes a plain decode, and says what it raised."""
    try:
        {"jax": _by_jax, "torch": _by_torch}[framework](name)
    except Exception as error:  # a broken installation can raise anything
        first = (str(error).strip().splitlines() or [""])[0]
        return f"a tiny call raised {type(error).__name__}: {first}"
    return None


def _by_jax(name: str) -> None:
    import jax

    from ..attention import paged_attention

    jax.block_until_ready(paged_attention(*call(request("plain", "decoder")), backend=name))


def _by_torch(name: str) -> None:
    from .usable import on_torch, plain_decode

    torch_side = importlib.import_module("pagedattn_torch")  # by name: the core imports no torch
    torch, device = sys.modules["torch"], on_torch(plain_decode()).device

    def zeros(array):
        return torch.zeros(array.shape, dtype=getattr(torch, array.dtype.name), device=device)

    query, cache, batch, spec = call(request("plain", "decoder"))
    cache = KVCache(*map(zeros, cache.planes))
    torch_side.paged_attention(zeros(query), cache, batch, spec, backend=name).cpu()


if __name__ == "__main__":
    backend, *frameworks = sys.argv[1:]
    print(json.dumps({framework: why_not(backend, framework) for framework in frameworks}))
