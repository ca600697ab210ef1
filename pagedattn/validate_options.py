"""Checks of the arrays that an attention call may bring beside query and cache."""

from .checks import an_array, describe, is_floating, require


def options(query, *, sinks=None) -> None:
    """Requires shapes and dtypes that fit a query that `validate.attention` has accepted."""
    if sinks is not None:
        _sinks(sinks, query.shape[1])


def _sinks(sinks, num_heads):
    an_array("sinks", sinks)
    require(
        sinks.shape == (num_heads,) and is_floating(sinks.dtype),
        f"sinks must be floating [num_heads], one for each of the {num_heads} query heads, got "
        f"{describe(sinks)}",
    )
