"""A check of seconds, once kernels are compiled: usable backends against the float64 oracle."""

import time

from .._dispatch import registry
from ..testing.harness import Cell, run_cell

# One of each phase, the options alone and together, and two dtypes.
CASES = (
    Cell("plain", "decode", "bfloat16", ""),
    Cell("all", "mixed", "float32", ""),
    Cell("causal=False", "cross", "bfloat16", ""),
)
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16}


def selfcheck(names: list[str]) -> list[dict[str, str]]:
    """The result of each case with each backend: "ok", "refused: ..." or "FAILED: ..."."""
    return [check(name, case) for name in names for case in CASES]


def check(name: str, case: Cell) -> dict[str, str]:
    start = time.perf_counter()
    try:
        result = run_cell(registry.load(name), case, jit=True, sizes=SIZES)
    except Exception as error:  # a broken installation can raise anything; the report goes on
        result = f"FAILED: {type(error).__name__}: {error}"
    seconds = f"{time.perf_counter() - start:.1f} s"
    return {"backend": name, "case": " ".join(case[:3]), "result": result, "time": seconds}
