"""A Triton kernel as a JAX function, launched by XLA itself."""

from collections.abc import Sequence
from typing import Any

import jax
from jaxtyping import Array

from .._kernels.triton.launch import Launch


def triton_call(
    kernel: Any,
    *arrays: Array,
    outs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, int, int],
    num_warps: int = 4,
    num_stages: int = 3,
    **constants: Any,
) -> tuple[Array, ...]:
    """Launches a Triton kernel on JAX arrays, as the backend `triton` does: inside jit, in place.

    The kernel is compiled while the call is traced, and no Python runs when it is launched.

    Args:
      kernel: a function under `triton.jit`, whose parameters are pointers to the arrays, then to
        the outs, then `tl.constexpr`.
      outs: shape and dtype of each result.
      grid: programs along three axes.
      num_warps, num_stages: as in Triton.
      constants: the kernel's constexpr parameters, by name; hashable.

    Returns:
      the results, which the kernel must write whole.

    Raises:
      ImportError: Triton is not installed, or JAX is not that for CUDA.

    A kernel that doubles numbers:

        @triton.jit
        def double_kernel(x, out, SIZE: tl.constexpr):
            index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
            tl.store(out + index, 2 * tl.load(x + index))

        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        (out,) = triton_call(double_kernel, x, outs=[shape], grid=(x.size // 64, 1, 1), SIZE=64)
    """
    from .triton.program import start

    return start(kernel, arrays, Launch(grid, {}, constants, num_warps, num_stages), tuple(outs))
