"""What an import loads, and that imports go one way: core <- torch side <- interop."""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from pagedattn._dispatch import registry

LAYERS = ("pagedattn", "pagedattn_torch", "pagedattn_interop")
HEAVY = {"numba", "torch", "triton", "hypothesis", "tvm_ffi", "jax_tvm_ffi", "xformers", "pytest"}
HEAVY |= {"cutlass", "flash_attn"}
MAY_IMPORT = {
    "pagedattn": {"pagedattn"},
    "pagedattn_torch": {"pagedattn", "pagedattn_torch"},
    "pagedattn_interop": set(LAYERS),
}


def loaded_by(*statements: str) -> list[set[str]]:
    """Top-level modules in a fresh interpreter after each of the statements, one after another."""
    shown = "import sys; print(*{name.split('.')[0] for name in sys.modules})"
    code = "\n".join(f"{statement}\n{shown}" for statement in statements)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


CORE = {
    "the core": "import pagedattn",
    "errors and specs": "pagedattn.AttentionSpec(); pagedattn.alibi_slopes(4)",
    "the xla backend": (
        "import jax.numpy as jnp\n"
        "batch = pagedattn.make_batch([1], [0], [[0]], block_size=4)\n"
        "cache = pagedattn.init_kv_cache(1, 4, 1, 8)\n"
        "query = jnp.ones((1, 1, 8), jnp.bfloat16)\n"
        "pagedattn.paged_attention(query, cache, batch, backend='xla')"
    ),
    "the oracle": "import pagedattn.testing",
}


def test_the_core_loads_nothing_heavy():
    loaded = dict(zip(CORE, loaded_by(*CORE.values()), strict=True))
    assert "jax" in loaded["the core"]
    heavy = {what: names & (HEAVY | {*LAYERS[1:]}) for what, names in loaded.items()}
    assert heavy == {what: set() for what in CORE}


def test_the_torch_layer_does_not_load_the_interop():
    (loaded,) = loaded_by("import pagedattn_torch")
    assert "torch" in loaded
    assert "pagedattn_interop" not in loaded


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
    """It is two files, of which one reads the other."""
    files = {path.name: path for path in sources("pagedattn") if path.parent.name == "testing"}
    for name, read in (("oracle.py", ["visibility"]), ("visibility.py", [])):
        assert imported(files[name]) == {"collections", "typing", "numpy"}
        tree = ast.parse(files[name].read_text())
        assert [
            n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level
        ] == read


def core_imports(path: Path) -> set[str]:
    """Modules of the core that one of its files imports when it is loaded, by dotted names."""
    package = ("pagedattn", *path.parent.relative_to(ROOT).parts)
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            above = package[: len(package) - node.level + 1]
            base = ".".join((*above, node.module) if node.module else above)
            found |= {f"{base}.{alias.name}" for alias in node.names}
            found |= {base} if node.module else set()
    return found


ROOT = sources("pagedattn")[0].parent  # __init__.py comes first


def reached_from(names: set[str]) -> set[str]:
    """What is imported by modules, directly or not."""
    files = {module_name(path): path for path in sources("pagedattn")}
    reached, new = set(), names & set(files)
    while new:
        reached |= new
        new = set().union(*(core_imports(files[name]) for name in new)) & set(files) - reached
    return reached


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("pagedattn", *(part for part in parts if part != "__init__")))


CHOICE = {
    "pagedattn._dispatch.backend",
    "pagedattn._dispatch.registry",
    "pagedattn._dispatch.select",
    "pagedattn.attention",
}


def test_values_do_not_reach_the_choice_of_a_backend():
    values = {
        "pagedattn.spec",
        "pagedattn.batch.metadata",
        "pagedattn.cache.kv_cache",
        "pagedattn.batch.make_batch",
    }
    assert values <= reached_from(values)
    assert not reached_from(values) & CHOICE
    assert reached_from({"pagedattn.attention"}) >= CHOICE


def test_arithmetic_does_not_reach_it_either():
    arithmetic = {
        "pagedattn.batch.indices",
        "pagedattn.masks",
        "pagedattn.merge",
        "pagedattn._dispatch.call",
    }
    assert arithmetic <= reached_from(arithmetic)
    assert not reached_from(arithmetic) & CHOICE


def test_the_choice_loads_no_backend():
    reached = reached_from({"pagedattn._dispatch.select"})
    assert not [name for name in reached if name.startswith("pagedattn.backends")]


# Of several backends.
SHARED = {"__init__", "dequantised", "gradient", "triton_call", "gather", "bias"}


def backend_files(package: str) -> dict[str, Path]:
    """The file of each backend below a package's backends, or the first one of its folder."""
    folder = sources(package)[0].parent / "backends"
    files = {path.stem: path for path in folder.glob("*.py") if path.stem not in SHARED}
    return files | {path.parent.name: path for path in folder.glob("*/__init__.py")}


def in_the_table(package: str) -> set[str]:
    """The backends that the registry expects there."""
    places = registry.BUILT_IN.items()
    return {name for name, where in places if f"{package}.backends" in f"{where.jax} {where.torch}"}


@pytest.mark.parametrize("package", ["pagedattn", "pagedattn_torch"])
def test_a_backend_is_a_file_or_a_folder_with_one_record(package):
    files = backend_files(package)
    assert set(files) == in_the_table(package)
    for path in files.values():
        statements = ast.parse(path.read_text()).body
        assigned = [n.targets[0] for n in statements if isinstance(n, ast.Assign)]
        names = [target.id for target in assigned if isinstance(target, ast.Name)]
        assert names.count("BACKEND") == 1, path
