"""Hypothesis profiles and the axes that every backend test runs over."""

import ctypes
import gc
import inspect
import os
import resource
from importlib.util import find_spec
from pathlib import Path

import hypothesis
import jax
import pytest
from cases import BACKENDS, MODES, PARTIAL, calls

# Programs that tests run in a process of their own: with Triton's interpreter, or emulated AMX.
collect_ignore = [
    "interpreters/triton_interpreted.py",
    "parallel/peers_interpreted.py",
    "backends/amx_emulated.py",
    "backends/cpu_prompts.py",
]
DEMO = [name for name in ("matplotlib", "optax", "rich", "safetensors") if not find_spec(name)]
if DEMO:  # the examples cannot be imported
    collect_ignore += ["serving", "parallel"]
NEEDED = ("httpx", "jinja2", "openai", "prometheus_client", "starlette", "tokenizers", "uvicorn")
SERVE = [name for name in NEEDED if not find_spec(name)]
collect_ignore_glob = ["serving/test_serve*", "serving/http_server.py"] if SERVE else []

if jax.default_backend() == "gpu":
    # Torch's current device stays the first: what forgets to enter its tensors' device is seen.
    jax.config.update("jax_default_device", jax.devices()[-1])


def pytest_report_header():
    missing = {"examples are": DEMO, "the server is": SERVE}
    return [
        f"{what} not tested without {', '.join(names)}" for what, names in missing.items() if names
    ]


def pytest_collection_modifyitems(config, items):
    """The long tests first. Under jaxtyping's hook (test_shapes.py) those of errors are left out.

    They give wrong arguments on purpose, and the hook would refuse them by an error of its own.
    """
    items.sort(key=lambda item: item.get_closest_marker("early") is None)
    if config.getoption("jaxtyping_packages", None):
        items[:] = [item for item in items if not _expects_an_error(item)]


def _expects_an_error(item):
    return hasattr(item, "function") and "raises(" in inspect.getsource(item.function)


PROFILES = {"few": 5, "ci": 15, "dev": 20, "deep": 500}  # examples a test
for name, examples in PROFILES.items():
    hypothesis.settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,  # the first example of a shape compiles
        derandomize=name in ("few", "ci"),  # which CI runs with
        print_blob=True,
        suppress_health_check=[
            hypothesis.HealthCheck.too_slow,
            hypothesis.HealthCheck.function_scoped_fixture,  # backend and mode are plain strings
        ],
    )
# A mutant has to be noticed, not to be shrunk to its least example.
hypothesis.settings.register_profile(
    "mutants",
    hypothesis.settings.get_profile("ci"),
    max_examples=25,
    phases=[hypothesis.Phase.generate],
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

STATM = Path("/proc/self/statm")
MOST_GROWTH = 1 << 30  # bytes


@pytest.fixture(params=[*BACKENDS, *PARTIAL])
def backend(request: pytest.FixtureRequest) -> str:
    """Name of a backend that must be usable on this machine."""
    return request.param


@pytest.fixture(params=["sdpa", *PARTIAL])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' layers are of the class of each of these backends."""
    torch_layers = pytest.importorskip("torch_layers")
    monkeypatch.setattr(torch_layers, "layer_cls", torch_layers.LAYERS[request.param])


held = [0]  # bytes in memory, at first and after the last time that programs were forgotten


def resident() -> int:
    """Bytes of this process in memory; 0 where nothing says so."""
    return int(STATM.read_text().split()[1]) * resource.getpagesize() if STATM.exists() else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What is imported and collected stays: no garbage is looked for in it, and then less often.

    It took a quarter of the time until the first test, and a tenth of the tests'.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 100)
        gc.enable()
        held[0] = resident()


def pytest_runtest_teardown():
    """A compiled program holds a megabyte, and memory maps: XLA crashes when there are no more."""
    if resident() > held[0] + MOST_GROWTH:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what is free stays with the process
        held[0] = resident()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    """A test of which a backend refused every example shows nothing: it counts as skipped."""
    calls.clear()
    try:
        return (yield)
    except (hypothesis.errors.Unsatisfiable, hypothesis.errors.FailedHealthCheck):
        if calls.refused and not calls.ran:
            pytest.skip(calls.refused[0])
        raise


@pytest.fixture
def exact_products():
    """JAX multiplies float32 with ten bits on a GPU, unless it is told not to."""
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture
def on_cpu():
    """New JAX arrays, and tensors made of them, lie on the CPU: there values can be checked."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """How the call is made: see `cases.attend`."""
    return request.param
