"""Problems whose numbers are far apart, made of those of caches of eight bits.

Formats with few bits of an exponent would lose what is small in them.
"""

import dataclasses
from functools import partial

import numpy as np

from pagedattn.testing import Problem

COLUMN, KEY = 3, 64  # a column that is set apart, and what a great key has in it
STEP = 128  # keys of a sequence whose scales are far from those of the next ones:
POWERS = 4, -3, 2, -2, 0  # of 4, for values


def magnified(problem: Problem, power: int) -> Problem:
    """Queries times two to a power that the logits' scale takes back."""
    factor = 2.0**power
    query = (problem.query.astype(np.float32) * factor).astype(problem.query.dtype)
    scale = problem.spec.scale_for(query.shape[-1]) / factor
    return problem.replace(query=query, spec=dataclasses.replace(problem.spec, scale=scale))


def with_a_great_column(problem: Problem, power: int) -> Problem:
    """A column of the queries is times two to a power, where keys are 0."""
    query, keys = problem.query.copy(), problem.key_cache.copy()
    query[..., COLUMN] *= query.dtype.type(2.0**power)
    keys[..., COLUMN] = 0
    return problem.replace(query=query, key_cache=keys)


def beside_a_sink(problem: Problem, logit: float) -> Problem:
    """The first key of each sequence has about so great a logit, and values of 0.

    Out is what the other keys give, with next to no weight.
    """
    changed = with_a_great_column(problem, 0)
    query, keys, values = changed.query, changed.key_cache, problem.value_cache.copy()
    first, held = [row[0] for row in problem.block_tables], np.nanmax(problem.key_scale)
    query[..., COLUMN] = logit / (problem.spec.scale_for(query.shape[-1]) * KEY * held)
    keys[first, 0], values[first, 0] = 0, 0
    keys[first, 0, :, COLUMN] = KEY
    scale = np.array(problem.key_scale)
    if scale.ndim > 1:
        scale[first, 0] = held
    return changed.replace(key_cache=keys, value_cache=values, key_scale=scale)


def with_scales_apart(problem: Problem) -> Problem:
    """Per-token scales of values that are larger in some steps of keys than before and after.

    Those of latents are the keys', too.
    """
    name = "key_scale" if problem.value_scale is None else "value_scale"
    scales = np.array(getattr(problem, name))
    for table in map(np.asarray, problem.block_tables):
        for i, block in enumerate(table[table >= 0]):
            power = POWERS[i * problem.block_size // STEP % len(POWERS)]
            scales[block] *= np.float32(4.0**power)
    return problem.replace(**{name: scales})


def with_negative_scales(problem: Problem) -> Problem:
    """Which turn every logit and every value round: scales are factors, whatever their sign."""
    names = [name for name in ("key_scale", "value_scale") if getattr(problem, name) is not None]
    return problem.replace(**{name: -np.asarray(getattr(problem, name)) for name in names})


HARDER = {
    "great column": partial(with_a_great_column, power=20),
    "sink": partial(beside_a_sink, logit=20.0),
    "great queries": partial(magnified, power=90),
    "tiny queries": partial(magnified, power=-60),
    "negative scales": with_negative_scales,
}
