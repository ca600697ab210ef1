"""What proves a backend: the oracle, the precision rule, strategies and the parity harness.

`import pagedattn` does not load this package. `pagedattn.testing.strategies` is imported by that
name and needs hypothesis: `pip install 'pagedattn[testing]'`.
"""

from .harness import Cell as Cell
from .harness import attend as attend
from .harness import batch_of as batch_of
from .harness import cache_of as cache_of
from .harness import check_backend as check_backend
from .oracle import reference_attention as reference_attention
from .oracle import reference_write as reference_write
from .problem import Problem as Problem
from .problem import random_problem as random_problem
from .tolerances import Expected as Expected
from .tolerances import assert_attention_close as assert_attention_close
from .tolerances import expect as expect
