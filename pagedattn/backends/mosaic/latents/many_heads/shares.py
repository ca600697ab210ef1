"""What two warpgroups have of a tile each, and what they tell each other."""

from ..kernel_config import HEAD_DIM, VALUE_DIM

HALF = VALUE_DIM // 2  # the columns that one warpgroup sums
REST = HEAD_DIM - VALUE_DIM  # that are keys' alone
TOP, TOTALS, LSE = 0, (1, 2), 3  # places among the vectors that both see
