"""Functions of single numbers; LLVM makes vectors of them in loops."""

import math

import numpy as np
from llvmlite import ir
from numba import types

from .compiling import fast, intrinsic

F = np.float32
# Cephes (Moshier, 1984-92): exp2 on [-0.5, 0.5] times ln 2, and tanh below 0.625.
LOG2_E, LN2_HIGH, LN2_LOW = F(1.44269504088896341), F(0.693359375), F(-2.12194440e-4)
E0, E1, E2 = F(1.9875691500e-4), F(1.3981999507e-3), F(8.3334519073e-3)
E3, E4, E5 = F(4.1665795894e-2), F(1.6666665459e-1), F(5.0000001201e-1)
T0, T1, T2 = F(-5.70498872745e-3), F(2.06390887954e-2), F(-5.37397155531e-2)
T3, T4 = F(1.33314422036e-1), F(-3.33332819422e-1)
LEAST = F(-87.0)  # below, exp is taken for 0
HALF, ONE, TWO = F(0.5), F(1), F(2)


@intrinsic
def _float_of_bits(typing, bits):
    def code(context, builder, signature, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), code


@fast
def exp(x):
    """e ** x for x <= 0, to 1 ulp; exactly 0 at -inf."""
    held = max(x, LEAST)
    n = np.floor(held * LOG2_E + HALF)  # math.floor would go by way of int64
    r = held - n * LN2_HIGH - n * LN2_LOW
    p = ((((E0 * r + E1) * r + E2) * r + E3) * r + E4) * r + E5
    power = _float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
    return F(0) if x < LEAST else (p * r * r + r + ONE) * power


@fast
def tanh(x):
    """Also exact near 0, where a soft-cap far above the logits must change nothing."""
    size = abs(x)
    z = x * x
    near = x + x * z * ((((T0 * z + T1) * z + T2) * z + T3) * z + T4)
    left = exp(-TWO * size)
    far = (ONE - left) / (ONE + left)
    far = -far if x < F(0) else far
    return near if size < F(0.625) else far


@fast
def log(x):
    return np.float32(math.log(x))
