"""Pages, examples and benchmarks use what the library promises to keep, and nothing else."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = {
    "pagedattn": ROOT / "pagedattn/__init__.py",
    "pagedattn.extend": ROOT / "pagedattn/extend.py",
    "pagedattn.testing": ROOT / "pagedattn/testing/__init__.py",
    "pagedattn.testing.strategies": ROOT / "pagedattn/testing/strategies.py",
    "pagedattn_torch": ROOT / "pagedattn_torch/__init__.py",
    "pagedattn_torch.transformers": ROOT / "pagedattn_torch/transformers/__init__.py",
    "pagedattn_interop": ROOT / "interop/pagedattn_interop/__init__.py",
}
CODE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROGRAMS = sorted((ROOT / "examples").rglob("*.py"))


def listed(path: Path) -> set[str]:
    """The names in a module's `__all__`, and, without one, those that it defines."""
    body = ast.parse(path.read_text()).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}


# The public modules, and what each lists; a module of this table is public in the one above it.
PUBLIC = {module: listed(path) for module, path in PLACES.items()}
for module in PLACES:
    package, _, name = module.rpartition(".")
    if package:
        PUBLIC[package].add(name)
PACKAGES = {module.partition(".")[0] for module in PLACES}


def private_names(code: str) -> list[str]:
    """The names of the library's that a program uses and no public module lists."""
    tree = ast.parse(code)
    modules = dict(imported_modules(tree))
    used = [*imported_names(tree), *attributes(tree, modules)]
    return sorted({f"{m}.{n}" for m, n in used if n not in PUBLIC.get(m, ())})


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The module and the name of each import, `import a.b` as the name b of a."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names if ours(node.module))
        elif isinstance(node, ast.Import):
            dotted = [alias.name.rpartition(".") for alias in node.names if ours(alias.name)]
            yield from ((module, name) for module, dot, name in dotted if dot)


def imported_modules(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The names by which a program calls the library's modules, and these."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if ours(alias.name):
                    top = alias.name.partition(".")[0]
                    yield (alias.asname, alias.name) if alias.asname else (top, top)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (module := f"{node.module}.{alias.name}") in PUBLIC:
                    yield alias.asname or alias.name, module


def attributes(tree: ast.AST, modules: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The names that a program takes from modules by a dot: `pa.make_batch`, `pa.testing.Cell`."""
    taken = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in taken:
        module = module_of(node.value, modules)
        if module and node.attr != "__all__":
            yield module, node.attr


def module_of(node: ast.expr, modules: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return modules.get(node.id)
    if isinstance(node, ast.Attribute) and (above := module_of(node.value, modules)):
        return f"{above}.{node.attr}" if f"{above}.{node.attr}" in PUBLIC else None
    return None


def ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", [p for p in PAGES if CODE.search(p.read_text())], ids=name_of)
def test_pages_use_public_names(page):
    assert not private_names("\n".join(CODE.findall(page.read_text())))


@pytest.mark.parametrize("program", PROGRAMS, ids=name_of)
def test_programs_use_public_names(program):
    assert not private_names(program.read_text())


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from pagedattn import ragged", ["pagedattn.ragged"]),
        ("from pagedattn.ragged import positions", ["pagedattn.ragged.positions"]),
        ("from pagedattn import _arrays as a, make_batch", ["pagedattn._arrays"]),
        ("import pagedattn.backends.xla", ["pagedattn.backends.xla"]),
        ("import pagedattn.backends.xla as x", ["pagedattn.backends.xla"]),
        ("import pagedattn as pa\npa.registry.load('xla')", ["pagedattn.registry"]),
        ("import pagedattn as pa\npa.testing.oracle", ["pagedattn.testing.oracle"]),
        ("from pagedattn import testing\ntesting.oracle", ["pagedattn.testing.oracle"]),
        ("def f():\n    from pagedattn_torch.step import Step", ["pagedattn_torch.step.Step"]),
        ("from pagedattn_interop import *", ["pagedattn_interop.*"]),
    ],
)
def test_private_names_are_found(code, found):
    assert private_names(code) == found


@pytest.mark.parametrize(
    "code",
    [
        "import pagedattn as pa\npa.make_batch; pa.__version__; pa.testing.check_backend",
        "import pagedattn.testing\npagedattn.testing.reference_attention",
        "from pagedattn.testing import strategies, check_backend\nstrategies.problems",
        "import pagedattn_interop, pagedattn_torch.transformers\npagedattn_interop.to_jax",
        "from pagedattn import extend as e\ne.Call.__name__\ne.Backend('mine').name",
        "from pagedattns import anything\nfrom .pagedattn import mine\nimport jax.numpy as jnp",
    ],
)
def test_public_names_are_not(code):
    assert private_names(code) == []
