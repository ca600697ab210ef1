"""As many devices as a test asks for: those of a CPU in a process of four, or GPUs."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh


def mesh_over(count: int, axis: str) -> Mesh:
    """A mesh of the first devices; the test is skipped where there are fewer."""
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices")
    return Mesh(np.array(jax.devices()[:count]), axis)
