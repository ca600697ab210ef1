"""An installed package, without its sources: `make smoke` runs this in an empty environment."""

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp

import pagedattn
import pagedattn.testing


def decodes() -> None:
    """A token is written and attended to, inside jit."""
    batch = pagedattn.make_batch([1], [4], [[1, 0]], block_size=4)
    cache = pagedattn.init_kv_cache(2, 4, 1, 8)
    one = jnp.ones((1, 1, 8), cache.dtype)

    @jax.jit
    def step(cache):
        cache = pagedattn.write_kv(cache, one, one, batch.slot_mapping)
        return pagedattn.paged_attention(one, cache, batch)

    assert step(cache).shape == (1, 1, 8)


def is_complete() -> None:
    """All names are there, types too, and nothing of the repository beside the packages."""
    assert "site-packages" in pagedattn.__file__
    assert all(hasattr(pagedattn, name) for name in pagedattn.__all__)
    files = {str(file) for file in importlib.metadata.files("pagedattn") or ()}
    packages = ("pagedattn", "pagedattn_torch", "pagedattn_interop")
    assert {f"{name}/py.typed" for name in packages} <= files
    folders = {name.split("/")[0] for name in files}
    assert {name for name in folders if "dist-info" not in name} <= {*packages}


def has_metadata() -> None:
    """The index page: version, links of the project, no link that leads nowhere there."""
    about = importlib.metadata.metadata("pagedattn")
    assert about["Version"] == pagedattn.__version__
    assert "Issues, https" in str(about.get_all("Project-URL"))
    page = str(about.get_payload()) + (about["Description"] or "")
    assert "# pagedattn" in page
    links = re.findall(r"\]\(([^)]+)\)|src(?:set)?=\"([^\"]+)", page)
    assert not [link for link in map("".join, links) if not link.startswith(("https://", "#"))]


def answers() -> None:
    """The command runs, and says what to install for the rest."""
    command = [sys.executable, "-I", "-m", "pagedattn"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "pip install 'pagedattn[torch]'" in " ".join(printed.split())
    found = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True).stdout
    assert json.loads(found)["backends"]["xla"] == {"jax": []}
    assert importlib.util.find_spec("torch") is None


if __name__ == "__main__":
    for check in (decodes, is_complete, has_metadata, answers):
        check()
    print(f"pagedattn {pagedattn.__version__}: installed and working")
