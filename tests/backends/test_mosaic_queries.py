"""Queries that are split into numbers of eight bits: their parts are a sum of what they were."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pagedattn.backends.mosaic.latents.eight_bits import queries

DTYPES = pytest.mark.parametrize("dtype", queries.SPLITS)
UNITS = {"float8_e4m3fn": 2.0**-17, "float8_e5m2": 2.0**-30, "int8": 1 / 32640}
HEADS, COLUMNS = 3, 64
LEAST = 2.0**-80  # factors are 2^100 at most
NUMBERS = st.floats(-(2.0**80), 2.0**80, width=32) | st.floats(-1, 1, width=32)
ROWS = arrays.arrays(np.float32, (HEADS, COLUMNS), elements=NUMBERS)


def parts_of(rows, dtype):
    """The parts in float64, and a factor on the products of each head."""
    largest = jnp.abs(rows).max(axis=1)
    up, down = queries.scales_of(largest, dtype)
    parts = queries.split(rows * up[:, None], dtype)
    assert {part.dtype for part in parts} == {jnp.dtype(dtype)}
    parts = np.stack([np.asarray(part, np.float64) for part in parts])
    return parts, np.asarray(down, np.float64)[:, None]


def total(parts, dtype):
    """What products of the parts are added up to, for a key that is 1 in one column."""
    products = jnp.concatenate(list(jnp.asarray(parts, jnp.float32)), axis=0).T
    if dtype == "int8":
        products = products.astype(jnp.int32)
    return np.float64(queries.sum_of_parts(products, HEADS)).T


@DTYPES
@given(rows=ROWS)
def test_parts_are_a_sum_of_bfloat16(dtype, rows):
    rows = jnp.asarray(rows.astype(ml_dtypes.bfloat16), jnp.float32)
    assume((jnp.abs(rows).max(axis=1) > LEAST).all())
    parts, factor = parts_of(rows, dtype)
    off = np.abs(total(parts, dtype) * factor - np.float64(rows))
    assert (off <= UNITS[dtype] * np.abs(np.float64(rows)).max(axis=1, keepdims=True)).all()


@DTYPES
def test_numbers_of_the_size_of_the_largest_are_exact(dtype):
    """All bfloat16 from it to a 64th, and its end, where parts have no more bits."""
    numbers = np.arange(2**14 - 6 * 2**7, 2**14, dtype=np.uint16).view(ml_dtypes.bfloat16)
    rows = jnp.asarray(np.tile(np.float32(numbers), (HEADS, 1)))
    parts, factor = parts_of(rows, dtype)
    off = np.abs(total(parts, dtype) * factor / np.float64(rows) - 1)
    assert off.max() <= (UNITS[dtype] if dtype == "int8" else 0)


@DTYPES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_products_of_what_is_not_finite_are_nan(dtype, bad):
    rows = jnp.ones((HEADS, COLUMNS)).at[1, 5].set(bad)
    _, factor = parts_of(rows, dtype)
    assert np.isnan(factor[1])
    assert np.isfinite(factor[[0, 2]]).all()
