"""The Triton kernels by Triton's interpreter, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.early
def test_kernels_by_the_interpreter():
    """Triton decides at its import whether it interprets: so in a process of its own."""
    pytest.importorskip("triton", minversion="3.5")
    pytest.importorskip("torch")
    path = Path(__file__).with_name("triton_interpreted.py")
    # The plugins would warn of xdist, or write while others do.
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *plugins, str(path)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "HYPOTHESIS_PROFILE": "few"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
