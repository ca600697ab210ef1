"""The best blocks of a row of scores: the least of them is found bit by bit, without sorting."""

import numpy as np

from .compiling import fast
from .memory import get_float32, get_int32, put_int32
from .softmax import NONE

LEAST = np.int32(-(1 << 31))  # of those that are never taken


@fast
def choose_best(scores, columns, chosen, count, orders):
    """Writes the columns of the `count` largest scores above -inf in ascending order, then -1.

    Of equal scores the first are taken. `orders` is room for as many int32 as there are columns.
    """
    for column in range(columns):
        put_int32(orders, column, order_of(scores, column))
    least = least_of_best(orders, columns, count)
    left = count - number_from(orders, columns, least + 1)
    place = np.int64(0)
    for column in range(columns):
        order = np.int64(get_int32(orders, column))
        if order > least or (order == least and order > LEAST and left > 0):
            left -= order == least
            put_int32(chosen, place, np.int32(column))
            place += 1
    for empty in range(place, count):
        put_int32(chosen, empty, np.int32(-1))


@fast
def order_of(scores, column):
    """An integer that is ordered as the scores are; LEAST for -inf and NaN."""
    score, bits = get_float32(scores, column), get_int32(scores, column)
    if not score > NONE:
        return LEAST
    return np.int32(bits ^ 0x7FFFFFFF) if bits < 0 else bits


@fast
def least_of_best(orders, columns, count):
    """The greatest number that at least `count` orders reach; LEAST if there are not so many."""
    least = np.int64(LEAST)
    if number_from(orders, columns, np.int64(0)) >= count:
        least = np.int64(0)
    for bit in range(31):
        higher = least | (np.int64(1) << (30 - bit))
        if number_from(orders, columns, higher) >= count:
            least = higher
    return least


@fast
def number_from(orders, columns, bound):
    """How many orders are at least `bound`, which is one above the largest int32 at most."""
    found = np.int32(0)
    if bound <= 0x7FFFFFFF:
        narrow = np.int32(bound)
        for column in range(columns):
            found += np.int32(get_int32(orders, column) >= narrow)
    return np.int64(found)
