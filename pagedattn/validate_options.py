"""Checks of the arrays that an attention call may bring beside query and cache."""

from .checks import an_array, require
from .facts import describe, dtype_name, is_floating, known


def options(query, *, sinks=None, bias=None) -> None:
    """Requires arrays that fit a query that `validate.attention` has accepted."""
    if sinks is not None:
        _sinks(sinks, query.shape[1])
    if bias is not None:
        _bias(bias, query)


def columns(seq_lens, *, bias=None, **_) -> None:
    """Requires, where lengths are known, a bias with a column for each key of a sequence."""
    if bias is None or (lens := known(seq_lens)) is None:
        return
    require(
        lens.max(initial=0) <= bias.shape[2],
        f"bias must have a column for each key of the longest sequence, got {describe(bias)} and "
        f"seq_lens {lens}",
    )


def _sinks(sinks, num_heads):
    an_array("sinks", sinks)
    require(
        sinks.shape == (num_heads,) and is_floating(sinks.dtype),
        f"sinks must be floating [num_heads], one for each of the {num_heads} query heads, got "
        f"{describe(sinks)}",
    )


def _bias(bias, query):
    an_array("bias", bias)
    require(
        dtype_name(bias.dtype) != "bool",
        f"bias must be floating, got {describe(bias)}: where True shows a key, "
        "jnp.where(bias, 0.0, -jnp.inf) is the bias",
    )
    num_tokens, num_heads, _ = query.shape
    fits = bias.ndim == 3 and bias.shape[0] == num_tokens and bias.shape[1] in (1, num_heads)
    dtypes = ("float32", dtype_name(query.dtype))
    require(
        fits and bias.shape[2] > 0 and dtype_name(bias.dtype) in dtypes,
        f"bias must be [num_tokens, num_heads or 1, max_keys] = [{num_tokens}, {num_heads} or 1, "
        f"at least 1], float32 or of the query's dtype, got {describe(bias)}",
    )
