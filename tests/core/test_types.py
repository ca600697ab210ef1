"""What type checkers and `help` know of the public names."""

import ast
import importlib
import inspect
import json
import os
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import pagedattn
import pagedattn_torch
from pagedattn import signatures

ROOT = Path(__file__).parents[2]
PACKAGES = ["pagedattn", "pagedattn_torch", "pagedattn_interop"]
PYRIGHT = Path(sys.executable).with_name("pyright")
needs_pyright = pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is missing")

USES = """
import jax, torch
import pagedattn, pagedattn_torch
from pagedattn import AttentionSpec, KVCache, init_kv_cache, make_batch

def uses(query: jax.Array, tensor: torch.Tensor, flag: bool) -> None:
    cache, batch = init_kv_cache(2, 4, 1, 8), make_batch([1], [0], [[0]], block_size=4)
    reveal_type(pagedattn.paged_attention(query, cache, batch))
    reveal_type(pagedattn.paged_attention(query, cache, batch, return_lse=True))
    reveal_type(pagedattn.paged_attention(query, cache, batch, return_lse=flag))
    pagedattn.paged_attention(query, cache, batch).reshape(-1)
    starts = batch.query_start_loc
    ragged = pagedattn.ragged_attention
    reveal_type(ragged(query, query, query, starts, starts, max_query_len=1, max_key_len=1))
    pages = KVCache(tensor, tensor)
    reveal_type(pagedattn_torch.paged_attention(tensor, pages, batch))
    reveal_type(pagedattn_torch.paged_attention(tensor, pages, batch, return_lse=True))
    reveal_type(cache.key)
    reveal_type(pages.value)
    reveal_type(pages.planes)
    latents = pagedattn.init_latent_cache(2, 4, 8, 6)
    reveal_type(pagedattn.write_kv(latents, query, None, batch.slot_mapping).key)
    reveal_type(pagedattn.paged_attention(query, latents, batch))
    reveal_type(batch.seq_lens)
    reveal_type(AttentionSpec().scale)
"""
TYPES = [
    "Array",
    "tuple[Array, Array]",
    "Array | tuple[Array, Array]",
    "Array",
    "Tensor",
    "tuple[Tensor, Tensor]",
    "Array",
    "Tensor | None",
    "tuple[Tensor, ...]",
    "Array",
    "Array",
    "Array",
    "float | None",
]


def pyright(*arguments) -> dict:
    command = [str(PYRIGHT), "--pythonpath", sys.executable, "--outputjson", *map(str, arguments)]
    # With --verifytypes it asks the first python in PATH for packages, not that of --pythonpath.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    places = {"PATH": path, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "interop")])}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | places, capture_output=True, text=True, check=False
    )
    return json.loads(done.stdout)


@needs_pyright
def test_return_lse_and_records_have_exact_types(tmp_path):
    (tmp_path / "uses.py").write_text(USES)
    paths = [str(ROOT), str(ROOT / "interop")]
    settings = {"include": ["."], "extraPaths": paths, "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    found = pyright("-p", tmp_path)["generalDiagnostics"]
    revealed = [entry["message"] for entry in found if entry["severity"] == "information"]
    assert [message.split('" is "')[1].rstrip('"') for message in revealed] == TYPES
    assert not [entry for entry in found if entry["severity"] == "error"]


@needs_pyright
@pytest.mark.early
@pytest.mark.parametrize("package", PACKAGES)
def test_the_types_of_public_names_are_complete(package):
    module = importlib.import_module(package)
    things = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    homes = tuple(f"{thing.__module__}.{name}" for name, thing in things.items())
    report = pyright("--verifytypes", package, "--ignoreexternal")["typeCompleteness"]
    public = [
        symbol
        for symbol in report["symbols"]
        if symbol["name"] in homes or symbol["name"].startswith(tuple(f"{h}." for h in homes))
    ]
    assert {symbol["name"] for symbol in public} >= set(homes)
    unknown = [s for s in public if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    assert not unknown


OVERLOADS = {
    "paged_attention": signatures.PagedAttention,
    "ragged_attention": signatures.RaggedAttention,
}


@pytest.mark.parametrize("name", OVERLOADS)
def test_the_overloads_have_the_parameters_of_the_functions(name):
    written = ast.parse(inspect.getsource(OVERLOADS[name])).body[0]
    assert isinstance(written, ast.ClassDef)
    overloads = [entry for entry in written.body if isinstance(entry, ast.FunctionDef)]
    assert len(overloads) == 3
    for overload in overloads:
        given = {a.arg for a in (*overload.args.args, *overload.args.kwonlyargs)} - {"self"}
        for module in (pagedattn, pagedattn_torch):
            parameters = inspect.signature(getattr(module, name)).parameters
            assert given | signatures.Options.__annotations__.keys() == parameters.keys()


@pytest.mark.parametrize("package", [*PACKAGES, "pagedattn.testing"])
def test_all_names_exist(package):
    module = importlib.import_module(package)
    assert module.__all__ == sorted(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)


def test_help_lists_the_functions():
    shown = pydoc.plain(pydoc.render_doc(pagedattn))
    for name in ("paged_attention(", "make_batch(", "class KVCache(", "append_tokens("):
        assert name in shown
    assert pagedattn.__version__ in shown
