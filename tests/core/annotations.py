"""What reads the annotations under jaxtyping's import hook: see test_shapes.py."""

import numpy as np
from beartype import BeartypeConf, FrozenDict, beartype

# Sizes may be NumPy's integers wherever they may be Python's.
checked = beartype(conf=BeartypeConf(hint_overrides=FrozenDict({int: int | np.integer})))
