"""Numba's decorators as they are used here, without their types: Numba alone calls this code."""

from typing import Any

from numba import extending, njit

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
