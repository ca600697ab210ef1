"""Tools to test a backend: the oracle, the precision rule, strategies and `check_backend`.

`import pagedattn` does not load this package. `pagedattn.testing.strategies` is imported by that
name and needs hypothesis: `pip install 'pagedattn[testing]'`.
"""

from .closeness import assert_attention_close
from .harness import Cell, check_backend
from .oracle import reference_attention, reference_write
from .problem import Problem
from .random_problems import random_problem
from .record import record
from .recorded import Recorded, read_record
from .running import attend, batch_of, cache_of
from .tolerances import Expected, expect

__all__ = [
    "Cell",
    "Expected",
    "Problem",
    "Recorded",
    "assert_attention_close",
    "attend",
    "batch_of",
    "cache_of",
    "check_backend",
    "expect",
    "random_problem",
    "read_record",
    "record",
    "reference_attention",
    "reference_write",
]
