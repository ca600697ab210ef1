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
from pagedattn._dispatch import signatures

ROOT = Path(__file__).parents[2]
PACKAGES = ["pagedattn", "pagedattn_torch", "pagedattn_interop"]
PYRIGHT = Path(sys.executable).with_name("pyright")
needs_pyright = pytest.mark.skipif(not PYRIGHT.exists(), reason="pyright is missing")


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
@pytest.mark.lint
@pytest.mark.parametrize("package", PACKAGES)
def test_the_types_of_public_names_are_complete(package):
    module = importlib.import_module(package)
    things = {name: getattr(module, name) for name in module.__all__ if name != "__version__"}
    # What lies in a private module goes by the name that users import.
    homes = {name: f"{thing.__module__}.{name}" for name, thing in things.items()}
    names = (*homes.values(), *(f"{package}.{name}" for name in homes))
    report = pyright("--verifytypes", package, "--ignoreexternal")["typeCompleteness"]
    public = [
        symbol
        for symbol in report["symbols"]
        if symbol["name"] in names or symbol["name"].startswith(tuple(f"{n}." for n in names))
    ]
    checked = {symbol["name"] for symbol in public}
    assert all(checked & {home, f"{package}.{name}"} for name, home in homes.items())
    unknown = [s for s in public if not s["isTypeKnown"] or s["isTypeAmbiguous"]]
    assert not unknown


OVERLOADS = {
    "paged_attention": (signatures.PagedAttention, signatures.Options),
    "ragged_attention": (signatures.RaggedAttention, signatures.RaggedOptions),
}


@pytest.mark.parametrize("name", OVERLOADS)
def test_the_overloads_have_the_parameters_of_the_functions(name):
    protocol, options = OVERLOADS[name]
    written = ast.parse(inspect.getsource(protocol)).body[0]
    assert isinstance(written, ast.ClassDef)
    overloads = [entry for entry in written.body if isinstance(entry, ast.FunctionDef)]
    assert len(overloads) == 3
    for overload in overloads:
        given = {a.arg for a in (*overload.args.args, *overload.args.kwonlyargs)} - {"self"}
        for module in (pagedattn, pagedattn_torch):
            parameters = inspect.signature(getattr(module, name)).parameters
            assert given | options.__annotations__.keys() == parameters.keys()


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
