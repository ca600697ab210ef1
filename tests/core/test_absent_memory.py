"""Tensors whose memory is not there: an error of ours, in place of the end of the process."""

from pathlib import Path

import pytest
from forked import run_forked

from pagedattn._dispatch.registry import can_load

CODE = """
import sys
sys.path[:0] = sys.argv[1:3]
import jax
jax.config.update("jax_platforms", "cpu")
import absent_memory
absent_memory.main(sys.argv[3])
"""
HERE = Path(__file__).parent


@pytest.mark.parametrize("part", ["core", "torch", "transforms"])
def test_calls_end_in_errors_of_ours(part):
    if part == "transforms" and not can_load("numba"):
        pytest.skip("of numba, which reads memory by itself")
    argv = str(HERE), str(HERE.parent), part
    imported = ["jax.numpy", *["numba"] * can_load("numba"), "pagedattn_interop"]
    done = run_forked(CODE, *imported, argv=argv)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
