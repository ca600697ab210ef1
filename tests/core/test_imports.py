"""What an import loads, and that imports go one way: pagedattn <- pagedattn_torch <- interop."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

LAYERS = ("pagedattn", "pagedattn_torch", "interop")
HEAVY = {"torch", "triton", "hypothesis", "tvm_ffi", "jax_tvm_ffi", "xformers", "pytest"}
MAY_IMPORT = {
    "pagedattn": {"pagedattn"},
    "pagedattn_torch": {"pagedattn", "pagedattn_torch"},
    "interop": set(LAYERS),
}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_core_loads_nothing_heavy():
    loaded = loaded_by("import pagedattn")
    assert "jax" in loaded
    assert not loaded & (HEAVY | {"pagedattn_torch", "interop"})


def test_listing_errors_and_specs_loads_nothing_heavy():
    loaded = loaded_by("import pagedattn; pagedattn.AttentionSpec(); pagedattn.alibi_slopes(4)")
    assert not loaded & (HEAVY | {"pagedattn_torch", "interop"})


def test_the_xla_backend_needs_no_torch():
    loaded = loaded_by(
        "import jax.numpy as jnp, pagedattn\n"
        "batch = pagedattn.make_batch([1], [0], [[0]], block_size=4)\n"
        "cache = pagedattn.init_kv_cache(1, 4, 1, 8)\n"
        "query = jnp.ones((1, 1, 8), jnp.bfloat16)\n"
        "pagedattn.paged_attention(query, cache, batch, backend='xla')\n"
    )
    assert not loaded & (HEAVY | {"pagedattn_torch", "interop"})


def test_the_oracle_needs_no_torch():
    assert "torch" not in loaded_by("import pagedattn.testing")


def test_the_torch_layer_does_not_load_interop():
    loaded = loaded_by("import pagedattn_torch")
    assert "torch" in loaded
    assert "interop" not in loaded


def sources(package: str) -> list[Path]:
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    return sorted(Path(spec.origin).parent.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports absolutely, at any depth of the code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module or "")
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", LAYERS)
def test_imports_go_one_way(package):
    files = sources(package)
    assert files
    forbidden = set(LAYERS) - MAY_IMPORT[package]
    wrong = {str(path): imported(path) & forbidden for path in files}
    assert not {path: names for path, names in wrong.items() if names}


def test_the_core_names_no_torch():
    """Not even late: the core reaches torch by entry point only."""
    for path in sources("pagedattn"):
        assert not imported(path) & {"torch", "tvm_ffi", "jax_tvm_ffi"}, path


def test_the_oracle_shares_no_code_with_the_library():
    oracle = next(path for path in sources("pagedattn") if path.name == "oracle.py")
    assert imported(oracle) == {"collections", "typing", "numpy"}
    tree = ast.parse(oracle.read_text())
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level]
