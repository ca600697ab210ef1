"""What is refused on which GPU, by its compute capability, and that the pages say so."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.5")
from calls import Attention, chosen, on, refusals
from gpus import GPUS, Gpu

from pagedattn.report.machine import MEASURED

PAGE = Path(__file__).parents[2] / "docs/backends.md"
OLD = {"V100": Gpu((7, 0), 80, 96), "T4": Gpu((7, 5), 40, 64)}
KNOWN = GPUS | OLD
SMALL = Attention(keys=1024)
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
    with on(KNOWN[name]):
        assert (chosen(SMALL) == "triton") == (name in GPUS)
        assert not refusals(SMALL, chosen(SMALL))


def test_the_table_of_gpus_is_that_of_the_code():
    """Which GPUs are refused, compiled for and measured, by their compute capability."""
    section = PAGE.read_text().split("\n## GPUs\n")[1]
    table = re.findall(r"^\| (.*) \| ([\d.]*) ?\| (.*) \| (.*) \| ?(.*)\|$", section, re.MULTILINE)
    assert {(*map(int, row[1].split(".")),) for row in table if row[1]} >= {
        gpu.capability for gpu in KNOWN.values()
    }
    for gpu, capability, triton, mosaic, beside in table:
        if not capability:
            assert (triton, mosaic) == ("interpreted", "interpreted")
            continue
        measured = any(gpu.startswith(kind.split()[1]) for kind in MEASURED)
        with on(Gpu((*map(int, capability.split(".")),), 100, 0)):
            for backend, told in (("triton", triton), ("mosaic", mosaic)):
                assert (told == "refused") == bool(refusals(SMALL, backend)), (gpu, backend)
                assert (told == "measured") == measured
            compiled = capability in {"{}.{}".format(*each.capability) for each in GPUS.values()}
            assert (triton in ("compiled for", "measured")) == compiled
            e4m3 = triton != "refused" and bool(refusals(E4M3, "triton"))
            assert ("float8_e4m3fn" in beside) == e4m3
            assert ("cudnn" in beside) == ("capability" in str(refusals(SMALL, "cudnn")))
