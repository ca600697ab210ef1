"""Holds results to what is expected of them, and says where they are off."""

from typing import Any

import numpy as np

from .problem import Problem
from .tolerances import Expected, expect


def assert_attention_close(
    out: Any, lse: Any, expected: Expected | Problem, *, name: str = "backend"
) -> None:
    """Raise AssertionError unless out and lse obey the precision rule.

    Args:
        out: `[num_tokens, num_heads, value_dim]`, any array that numpy reads.
        lse: `[num_tokens, num_heads]`, or None when the call gave none.
        expected: from `expect`, or the problem itself.
        name: who computed it, for the message.

    Padding rows, and rows that see no key and have no sink, must be exactly 0 and -inf.

    Example:
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import attend, random_problem
        >>> problem = random_problem([1, 3], [9, 3], AttentionSpec())
        >>> assert_attention_close(*attend(problem, backend="xla"), problem)
    """
    expected = expect(expected) if isinstance(expected, Problem) else expected
    empty = np.isneginf(expected.lse)
    check(f"{name}: out", as_float64(out), expected.out, expected.out_error, empty, 0.0)
    if lse is not None:
        got = as_float64(lse)
        check(f"{name}: lse", got, expected.lse, expected.lse_error, empty, -np.inf)


def as_float64(x: Any) -> np.ndarray:
    """Any array of a float dtype, bfloat16 torch tensors too, as float64."""
    x = x.detach().cpu().double() if hasattr(x, "detach") else x
    return np.asarray(x).astype(np.float64)


def check(
    name: str,
    got: np.ndarray,
    want: np.ndarray,
    allowed: np.ndarray,
    empty: np.ndarray,
    nothing: float,
) -> None:
    """Raise unless empty rows hold exactly `nothing` and |got - want| <= allowed in the others."""
    if got.shape != want.shape:
        raise AssertionError(f"{name} has shape {got.shape}, expected {want.shape}")
    check_empty(name, got, empty, nothing)
    seen = ~empty.reshape(*empty.shape, *[1] * (want.ndim - empty.ndim))
    check_rows(name, np.where(seen, got, 0), np.where(seen, want, 0), allowed)


def check_rows(name: str, got: np.ndarray, want: np.ndarray, allowed: np.ndarray) -> None:
    """Raise with the place and the size of the worst error unless |got - want| <= allowed."""
    error = np.abs(got - want)
    bad = ~(error <= allowed)  # NaN is bad
    if not bad.any():
        return
    excess = np.where(np.isnan(error), np.inf, error - allowed)
    worst = np.unravel_index(np.argmax(np.where(bad, excess, -np.inf)), error.shape)
    limit = np.broadcast_to(allowed, error.shape)[worst]
    place = tuple(int(i) for i in worst)
    rows = sorted({int(i) for i in np.nonzero(bad)[0]})
    raise AssertionError(
        f"{name} is off in {int(bad.sum())} of {bad.size} values, in tokens {rows[:8]}; worst at "
        f"{place}: got {got[worst]:.6g}, expected {want[worst]:.6g}, "
        f"error {error[worst]:.3g}, allowed {limit:.3g}"
    )


def check_empty(name: str, got: np.ndarray, empty: np.ndarray, value: float) -> None:
    """Raise unless every row without keys holds exactly `value`."""
    held = got == value
    wrong = empty & ~(held.all(-1) if got.ndim > empty.ndim else held)
    if wrong.any():
        token, head = (int(i[0]) for i in np.nonzero(wrong))
        raise AssertionError(
            f"{name} must be {value} in rows that see no key; "
            f"token {token}, head {head} has {got[token, head]}"
        )
