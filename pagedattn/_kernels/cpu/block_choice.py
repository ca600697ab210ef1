"""The best blocks of rows of scores: the least of a row is found bit by bit, without sorting.

The struct of a call says what there is: `query` are the scores `[num_seqs, max_blocks]`, a sequence
for each row, and `out` the columns of the best ones, `[num_seqs, num_selected]`.
"""

import numpy as np

from .call_args import APART, args_at, offset
from .compiling import fast
from .memory import add_at, aligned_alloc, free, get_float32, get_int32, put_int32
from .schedule import begin_alike
from .softmax import NONE

LEAST = np.int32(-(1 << 31))  # of those that are never taken
CLAIMED, DONE = map(offset, ("claimed", "done"))
PASSES = 32  # over a row: one for each bit


@fast
def begin_choice(call):
    """The address of new arguments with the fields of the given ones; an item is a row."""
    given = args_at(call)
    return begin_alike(call, given.num_seqs, 4 * PASSES * given.num_seqs * given.max_blocks)


@fast
def work_on_choice(address):
    """Works on rows until none is left to begin."""
    args, room = args_at(address), 0
    row = add_at(address + CLAIMED, 1)
    while row < args.num_items:
        if room == 0:
            room = aligned_alloc(APART, APART * -(-4 * args.max_blocks // APART))
        scores = args.query + 4 * row * args.max_blocks
        chosen = args.out + 4 * row * args.num_selected
        choose_best(scores, args.max_blocks, chosen, args.num_selected, room)
        add_at(address + DONE, 1)
        row = add_at(address + CLAIMED, 1)
    if room != 0:
        free(room)


@fast
def choose_best(scores, columns, chosen, count, orders):
    """Writes the columns of the `count` largest scores above -inf in ascending order, then -1.

    Of equal scores the first are taken. `orders` is room for as many int32 as there are columns.
    """
    for column in range(columns):
        put_int32(orders, column, order_of(scores, column))
    least = least_of_best(orders, columns, count)
    left = count - number_from(orders, columns, least + 1)
    reached = keep_columns(orders, columns, np.int32(max(least, LEAST + 1)))
    place = np.int64(0)
    for index in range(reached):
        column = get_int32(orders, index)
        order = order_of(scores, np.int64(column))
        if order > least or left > 0:
            left -= order == least
            put_int32(chosen, place, column)
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
def keep_columns(orders, columns, bound):
    """Puts the columns whose orders reach the bound in place of the orders; their number.

    Without a branch: few reach it, and nothing says which.
    """
    reached = np.int64(0)
    for column in range(columns):
        order = get_int32(orders, column)
        put_int32(orders, reached, np.int32(column))
        reached += order >= bound
    return reached


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
            # Numba's sum of two int32 is an int64, of which half as many fit a vector.
            found = np.int32(found + (get_int32(orders, column) >= narrow))
    return np.int64(found)
