"""Hypothesis profiles and the axes that every backend test runs over."""

import os

import hypothesis
import jax
import pytest

from pagedattn.registry import can_load

# Only ever run by test_triton, in a process in which Triton interprets.
collect_ignore = ["triton_interpreted.py"]

PROFILES = {"dev": 20, "ci": 25, "deep": 500}  # examples a test
for name, examples in PROFILES.items():
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,  # the first example of a shape compiles
        derandomize=name == "ci",
        print_blob=True,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,  # backend and mode are plain strings
        ],
    )
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

# Those that honour everything; the others have test files of their own.
EVERYTHING = {"cpu": ("xla", "sdpa"), "gpu": ("xla", "sdpa", "triton")}
BACKENDS = [n for n in EVERYTHING[jax.default_backend()] if can_load(n)]
MODES = ("eager", "jit")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend that must be usable on this machine."""
    return request.param


@pytest.fixture
def on_cpu():
    """New JAX arrays, and tensors made of them, lie on the CPU: there values can be checked."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """How the call is made: see `cases.attend`."""
    return request.param
