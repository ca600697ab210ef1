"""The one precision rule: how far a backend may be from the float64 oracle."""

import functools
import inspect
import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from . import oracle
from .problem import Problem

# The allowed error is the sum of these (`expect` has the details).
PLAIN_FACTOR = 2.0  # times the error of the plain computation in the input dtype
SPACINGS = 1.0  # spacings of the result in its dtype; for out only
ACCUMULATION = 4.0  # float32 roundings of every term that is summed
LSE_SPACING = 1 / 16  # of a spacing, for lse only: kernels for half dtypes have a coarser exp


class Expected(NamedTuple):
    """What a problem must give: exact values and how far off each may be.

    out `[num_tokens, num_heads, value_dim]`, out_error `[num_tokens, num_heads, 1]`,
    lse and lse_error `[num_tokens, num_heads]`, all float64.
    """

    out: np.ndarray
    out_error: np.ndarray
    lse: np.ndarray
    lse_error: np.ndarray


def epsilon(dtype: Any) -> float:
    """Spacing of `dtype` at 1.0."""
    return float(ml_dtypes.finfo(dtype).eps)


def expect(problem: Problem) -> Expected:
    """The oracle's answer to `problem`, and the error allowed in every row.

    A row may differ from the oracle by the sum of

    - twice the largest error, in that row's sequence, of the same formula computed plainly: inputs,
      scores, probabilities and results rounded to the precision of the input dtype (`rounded`),
      the softmax in float32; or, of quantised caches, exactly but from what is so rounded: queries
      times the scale of the keys, or keys and values times the scales of their tokens;
    - the row's largest value times the dtype's spacing at 1 (lse: a sixteenth of that spacing);
    - four float32 roundings of each term of the sums behind it (`float32_error`).

    Example:
        >>> from pagedattn import AttentionSpec
        >>> from pagedattn.testing import random_problem
        >>> problem = random_problem([1, 3], [9, 3], AttentionSpec())
        >>> bool((expect(problem).out_error < 1e-5).all())
        True
    """
    dtype = problem.query.dtype
    out, lse = reference(problem)
    out_gap, lse_gap = gaps(out, lse, *plain_attention(problem))
    if problem.key_scale is not None:  # the plain roundings may happen to make up for this one
        rounded = gaps(out, lse, *folded_reference(problem))
        out_gap, lse_gap = np.maximum(out_gap, rounded[0]), np.maximum(lse_gap, rounded[1])
    sum_out, sum_lse = float32_error(problem)
    out_error = PLAIN_FACTOR * worst_of_sequence(problem, out_gap)
    out_error += SPACINGS * epsilon(dtype) * np.abs(out).max(-1) + ACCUMULATION * sum_out
    lse_error = PLAIN_FACTOR * worst_of_sequence(problem, lse_gap)
    lse_error += LSE_SPACING * epsilon(dtype) + ACCUMULATION * sum_lse
    return Expected(out, out_error[..., None], lse, lse_error)


def gaps(out, lse, other_out, other_lse) -> tuple[np.ndarray, np.ndarray]:
    """`[num_tokens, num_heads]`: how far another out and lse are from these."""
    # -inf - -inf is NaN: rows without keys are compared exactly, not by their error
    finite = np.isfinite(lse)
    lse_gap = np.abs(np.where(finite, other_lse, 0) - np.where(finite, lse, 0))
    return np.abs(other_out - out).max(-1), lse_gap


def arguments(problem: Problem) -> dict[str, Any]:
    """The arguments of the oracle, by name."""
    return {name: getattr(problem, name) for name in _ARGUMENTS}


_ARGUMENTS = tuple(inspect.signature(oracle.reference_attention).parameters)


def reference(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """`reference_attention` of a problem."""
    return oracle.reference_attention(**arguments(problem))


def folded_reference(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The exact answer from what holds the scales, rounded: see `folded`."""
    out, lse = reference(folded(problem))
    return scaled(out, out_scale(problem), problem.key_cache.shape[2]), lse


def worst_of_sequence(problem: Problem, error: np.ndarray) -> np.ndarray:
    """`[num_tokens, num_heads]`: in every row the largest error of the row's sequence."""
    worst = np.zeros_like(error)
    for start, stop in itertools.pairwise(problem.query_start_loc):
        worst[start:stop] = error[start:stop].max(initial=0)
    return worst


def plain_attention(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The formula in the input dtype with a float32 softmax: out and lse, as float64 arrays.

    The scale of quantised keys is a factor on the queries, and that of values on out; scales of
    tokens are factors on keys and values.
    """
    spec, dtype, value_scale = problem.spec, problem.query.dtype, out_scale(problem)
    problem = folded(problem)
    product = functools.partial(plain_matmul, dtype=dtype)
    out = np.zeros(problem.out_shape)
    lse = np.full(problem.query.shape[:2], -np.inf)
    for head in oracle.heads(**arguments(problem)):
        score = oracle.logits(single(head), spec, product)
        probability, lse[head.rows, head.index] = oracle.softmax(score, head.sink)
        out[head.rows, head.index] = oracle.weighted(head, probability, product)
    return scaled(out, value_scale, problem.key_cache.shape[2]).astype(dtype).astype(float), lse


def out_scale(problem: Problem) -> np.ndarray | None:
    """The scale of the values, which may be columns of the keys; None of those with their own."""
    if problem.token_scales:
        return None
    return problem.key_scale if problem.value_cache is None else problem.value_scale


def folded(problem: Problem) -> Problem:
    """The problem with the scale of its keys in its queries, and without that of its values.

    Scales of tokens are in its keys and values, so in theirs.
    """
    if problem.token_scales:
        return dequantised(problem)
    query = scaled(problem.query.astype(float), problem.key_scale, problem.key_cache.shape[2])
    query = rounded(query, problem.query.dtype)
    return problem.replace(query=query, key_scale=None, value_scale=None)


def dequantised(problem: Problem) -> Problem:
    """The problem with plain keys and values, of the queries' precision."""
    held: dict[str, Any] = {"key_scale": None, "value_scale": None}
    for name in ("key", "value"):
        plane, scale = (getattr(problem, f"{name}_{what}") for what in ("cache", "scale"))
        if plane is not None:
            rows = oracle.numbers(plane)
            groups = scale.reshape(*rows.shape[:3], -1).astype(float)
            with np.errstate(invalid="ignore"):  # of poison in what nobody sees
                rows = rows * np.repeat(groups, rows.shape[3] // groups.shape[3], axis=3)
            held[f"{name}_cache"] = rounded(rows, problem.query.dtype)
    return problem.replace(**held)


def scaled(rows: np.ndarray, scale: np.ndarray | None, num_kv_heads: int) -> np.ndarray:
    """Rows of query heads times the scale of their KV head."""
    scale = np.broadcast_to(1.0 if scale is None else scale, num_kv_heads)
    return rows * np.repeat(scale, rows.shape[1] // num_kv_heads)[:, None]


def single(head: oracle.Head) -> oracle.Head:
    """What is added to the logits of a head in float32, as its matrix products are."""
    distance, bias = head.distance.astype(np.float32), head.bias.astype(np.float32)
    return head._replace(distance=distance, bias=bias)


def plain_matmul(a: np.ndarray, b: np.ndarray, dtype: Any) -> np.ndarray:
    """`a @ b` of rounded values, summed in float32, rounded, as float32."""
    product = rounded(a, dtype).astype(np.float32) @ rounded(b, dtype).astype(np.float32)
    return rounded(product, dtype).astype(np.float32)


def rounded(values: np.ndarray, dtype: Any) -> np.ndarray:
    """float64 values with the precision of a dtype, but not its range: none is subnormal or inf."""
    mantissa, exponent = np.frexp(values.astype(float))
    return np.ldexp(mantissa.astype(dtype).astype(float), exponent)


def float32_error(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """First-order bound, `[num_tokens, num_heads]`, of one float32 rounding of every summed term.

    A logit is off by at most eps times the absolute sum of its terms; the errors of out and lse
    are those of the logits, weighted by the probabilities.
    """
    spec, eps = problem.spec, epsilon(np.float32)
    out = np.zeros(problem.query.shape[:2])
    lse = np.zeros(problem.query.shape[:2])
    for head in oracle.heads(**arguments(problem)):
        probability, exact = oracle.softmax(oracle.logits(head, spec), head.sink)
        blur = probability * (1 + logit_magnitude(head, spec))
        spread = np.abs(head.values).max(-1, initial=0, keepdims=True)
        summed = oracle.weighted(head._replace(values=spread), blur)
        out[head.rows, head.index] = eps * np.abs(summed)[:, 0]
        lse[head.rows, head.index] = eps * (blur.sum(-1) + np.abs(np.where(blur.any(-1), exact, 0)))
    return out, lse


def logit_magnitude(head: oracle.Head, spec: Any) -> np.ndarray:
    """float64 `[q, k]`: the absolute sum of the terms of each logit, before any cap."""
    slopes = spec.alibi_slopes
    spec = replace(
        spec,
        scale=None if spec.scale is None else abs(spec.scale),
        logits_soft_cap=None,
        alibi_slopes=None if slopes is None else tuple(-abs(slope) for slope in slopes),
    )
    sizes = head._replace(
        query=np.abs(head.query),
        keys=np.abs(head.keys),
        bias=np.where(np.isfinite(head.bias), np.abs(head.bias), 0),
        visible=np.ones_like(head.visible),
    )
    return oracle.logits(sizes, spec)
