"""Where programs can be compiled for an H200, and what they are told about it."""

import types

import jax
import pytest
from h200 import COMPUTE_CAPABILITY, CORES, mesh_of


@pytest.fixture(autouse=True, scope="module")
def on_an_h200():
    """What the backends ask the machine, answered as an H200 would.

    Skips where there is a GPU, on which programs run, and where JAX cannot compile for one.
    """
    if jax.default_backend() == "gpu":
        pytest.skip("programs run here")
    pytest.importorskip("triton", minversion="3.5")
    try:
        mesh_of(1)
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        pytest.skip(f"JAX cannot compile for CUDA: {error}")
    from pagedattn.backends import mosaic, triton
    from pagedattn.backends.triton import program

    device = types.SimpleNamespace(compute_capability=COMPUTE_CAPABILITY, core_count=CORES)
    caches = mosaic.launch._capability, triton.capability, triton._device, program._capability
    for cached in caches:
        cached.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *kind: [device])
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(program.launcher, "get_compute_capability", lambda _: 90)
        yield
    for cached in caches:
        cached.cache_clear()
