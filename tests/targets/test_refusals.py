"""What is refused on which GPU, by its compute capability, and that the pages say so."""

from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.5")
from calls import Attention, chosen, on, refusals
from gpus import GPUS, Gpu

PAGE = Path(__file__).parents[2] / "docs/backends.md"
OLD = {"V100": Gpu((7, 0), 80, 96), "T4": Gpu((7, 5), 40, 64)}
KNOWN = GPUS | OLD
E4M3 = Attention(cache_dtype="float8_e4m3fn")
# The narrowest program of so wide keys and values, in 32 bits, takes more than 99 KiB.
WIDE = Attention(head_dim=576, value_dim=512, dtype="float32")
LATENT = WIDE._replace(latent=True)


def refusing(backend: str, call: Attention) -> set[str]:
    """The GPUs on which a backend refuses a call, by a reason that names their capability."""
    found = set()
    for name, gpu in KNOWN.items():
        with on(gpu):
            if refusals(call, backend):
                found.add(name)
    return found


def test_triton_runs_from_8_0_on():
    assert refusing("triton", Attention()) == {*OLD}


def test_mosaic_runs_on_hopper_alone():
    assert refusing("mosaic", Attention()) == {*KNOWN} - {"H200"}
    latents = LATENT._replace(dtype="bfloat16", num_heads=128, num_kv_heads=1)
    assert refusing("mosaic", latents) == {*KNOWN} - {"H200"}


def test_what_needs_conversions_or_memory_that_a_gpu_lacks_is_refused():
    assert refusing("triton", E4M3) == {*OLD, "A100", "A10"}
    assert refusing("triton", WIDE) == {*OLD, "A10", "L4", "RTX 5090"}
    assert refusing("triton", LATENT) == {*OLD}


@pytest.mark.parametrize("name", KNOWN)
def test_what_is_chosen_is_not_refused(name):
    call = Attention(keys=1024)
    with on(KNOWN[name]):
        assert chosen(call) == ("triton" if name in GPUS else "xla")
        assert not refusals(call, chosen(call))
