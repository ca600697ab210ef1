"""Tests are collected wherever JAX and torch are: what needs more is skipped, not an error."""

import subprocess
import sys
from pathlib import Path

OPTIONAL = (
    "beartype equinox flax httpx jinja2 matplotlib numba openai optax playwright prometheus_client "
    "ray rich safetensors starlette tokenizers transformers triton uvicorn"
)
COLLECT = f"""
import sys
sys.modules.update(dict.fromkeys({OPTIONAL.split()}))  # importing one raises an ImportError
import pytest
plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]  # the latter warns of pytest-xdist
sys.exit(pytest.main(["--collect-only", "-qq", *plugins, "tests"]))
"""


def test_collected_without_the_optional_packages():
    command = [sys.executable, "-c", COLLECT]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
