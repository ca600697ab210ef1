"""Numba's decorators as they are used here, without their types: Numba alone calls this code."""

import functools
from collections.abc import Callable
from typing import Any

from numba import extending, njit
from numba.core.compiler_lock import global_compiler_lock

# Sums in any order and fused products, but NaN and infinity stay what they are; no division raises.
MODE: dict[str, Any] = {
    "fastmath": {"reassoc", "contract", "nsz", "arcp"},
    "error_model": "numpy",
}
fast: Any = njit(**MODE)
# LLVM would work on a function anew for each level of calls above it: of those that have large ones
# beneath them, Numba puts the text into the caller's.
within: Any = njit(inline="always", **MODE)
intrinsic: Any = extending.intrinsic


def once(function: Callable) -> Any:
    """`functools.cache`, but callers in other threads wait for the one whose call computes.

    Two would compile twice, and XLA refuses a second address for a name that is registered.
    """
    made: dict[tuple, Any] = {}

    @functools.wraps(function)
    def call(*key):
        if key not in made:
            with global_compiler_lock:
                if key not in made:
                    made[key] = function(*key)
        return made[key]

    vars(call)["cache_clear"] = made.clear
    return call
