"""What the tests of the Mosaic kernels ask for: a JAX that has it, and for results a Hopper GPU."""

import jax
import ml_dtypes
import pytest

plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")
if not hasattr(plgpu, "warp_map"):
    pytest.skip("this JAX has no warps in Pallas Mosaic GPU", allow_module_level=True)

BF16 = ml_dtypes.bfloat16
HOPPER = jax.default_backend() == "gpu" and jax.devices()[0].compute_capability == "9.0"
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
