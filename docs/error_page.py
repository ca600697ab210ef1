"""Writes docs/errors.md: every error text of the three packages, read from their source.

Run it when a text has changed: `python docs/error_page.py`.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "errors.md"
PACKAGES = ("pagedattn", "pagedattn_torch", "interop/pagedattn_interop")
LONGEST_NAME = 28  # characters of a computed part that the page shows
REFUSAL = "Reasons of a refusal"
# The name in the code, and what the page says of it.
KINDS = {
    "InvalidInputError": "An argument has a wrong shape, dtype or value; also a `ValueError`. "
    "Nothing has been written.",
    "UnsupportedError": "A backend does not support an option of this call; also a "
    "`NotImplementedError`. Nothing is ignored or approximated: name another backend, or none.",
    "BackendUnavailableError": "A backend is unknown, or a package is not installed; also an "
    "`ImportError`.",
    "OutOfBlocksError": "Some sequences of a step found no free blocks; also a `MemoryError`. They "
    "are as they were, the others have grown.",
    "CallError": "A torch function called by `torch_call` has failed; its own error is named.",
    "LookupError": "A compiled program calls a torch function that its process does not have.",
    REFUSAL: "What `explain` returns, and what follows the colon of an `UnsupportedError` or a "
    "`BackendUnavailableError`; also the reasons why `backend=None` passes over a backend.",
}
HEAD = """\
# Errors

Every error that the library raises on purpose is a `PagedAttentionError`. Its text says what was
expected, what was given, and how to fix it. This page lists every text, with `{...}` for the parts
that differ from call to call, and the file that raises it. `python docs/error_page.py` generates
the page from the source.
"""


class Text(NamedTuple):
    kind: str
    text: str
    path: str


def texts() -> list[Text]:
    """Every text, in the order of the packages and their files."""
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [text for path in files for text in texts_of(path)]
    return list(dict.fromkeys(found))


def texts_of(path: Path) -> Iterator[Text]:
    place, module = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
    for function, node in nodes(module):
        scope = Scope(function, module)
        for kind, expression in messages(node, function):
            yield from (Text(kind, text, place) for text in scope.templates(expression))


def nodes(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Every node with the function, or the module, that it stands in."""
    function = function or tree
    for node in ast.iter_child_nodes(tree):
        yield function, node
        yield from nodes(node, node if isinstance(node, ast.FunctionDef) else function)


def messages(node: ast.AST, function: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """The texts that a statement or a call gives to users, each with its kind."""
    name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and name in KINDS and node.args:
        yield name, node.args[0]
    elif gives_reasons(function):
        yield from ((REFUSAL, text) for text in reasons_in(node))


def gives_reasons(function: ast.AST) -> bool:
    """Whether a function returns reasons: `-> list[str]`, as the fields of a Backend do."""
    returns = getattr(function, "returns", None)
    return returns is not None and ast.unparse(returns) == "list[str]"


def reasons_in(node: ast.AST) -> list[ast.expr]:
    """The sentences that a statement returns or appends, or that `reasons` begin with."""
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".append"):
        return sentences(node.args[0])
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "reasons":
        return sentences(node.value)
    return sentences(node.value) if isinstance(node, ast.Return) and node.value else []


def sentences(node: ast.AST) -> list[ast.expr]:
    """The outermost strings of an expression, those of one word left out."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and node.value):
        return [node] if " " in ast.unparse(node) else []
    return [text for child in ast.iter_child_nodes(node) for text in sentences(child)]


class Scope(NamedTuple):
    """Where the names in a text get their values."""

    function: ast.AST
    module: ast.Module

    def templates(self, node: ast.expr) -> list[str]:
        """A text with its computed parts in braces; one for each that a variable may hold.

        None where all is computed: the text is then that of another error.
        """
        found = [node]
        if isinstance(node, ast.Name):
            found = assigned(node.id, ast.walk(self.function))
        return [text for text in map(self.template, found) if re.sub(r"{.*?}", "", text).strip()]

    def template(self, node: ast.AST) -> str:
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self.template, node.values))
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.template(node.left) + self.template(node.right)
        if isinstance(node, ast.FormattedValue):
            is_sum = isinstance(node.value, ast.BinOp)  # of numbers: nobody joins texts in braces
            return placeholder(node.value) if is_sum else self.template(node.value)
        if isinstance(node, ast.Constant):
            return str(node.value)
        known = assigned(ast.unparse(node), self.module.body) or returned(node, self.module.body)
        return self.template(known[0]) if known else placeholder(node)


def placeholder(node: ast.AST) -> str:
    """The name of a computed part, or dots for a long computation."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("shown", "describe"):
        node = node.args[0]
    name = ast.unparse(node)
    return "{" + (name if len(name) <= LONGEST_NAME else "...") + "}"


def assigned(name: str, statements: Iterable[ast.AST]) -> list[ast.expr]:
    """What is assigned to a name, in turn."""
    assignments = [node for node in statements if isinstance(node, ast.Assign)]
    return [node.value for node in assignments if name in map(ast.unparse, node.targets)]


def returned(call: ast.AST, statements: Iterable[ast.AST]) -> list[ast.JoinedStr]:
    """The text that a call gives of a function which does nothing but compose it."""
    name = ast.unparse(call.func) if isinstance(call, ast.Call) else None
    functions = [f for f in statements if isinstance(f, ast.FunctionDef) and f.name == name]
    ends = [[n for n in ast.walk(f) if isinstance(n, ast.Return)] for f in functions]
    values = [end[0].value for end in ends if len(end) == 1]
    return [value for value in values if isinstance(value, ast.JoinedStr)]


def page() -> str:
    by_kind: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for kind, text, path in texts():
        by_kind[kind][text].append(path)
    sections = [section(kind, by_kind[kind]) for kind in KINDS if by_kind[kind]]
    return "\n".join([HEAD, *sections])


def section(kind: str, places: dict[str, list[str]]) -> str:
    rows = [f"- `` {text} ``  \n  {', '.join(paths)}" for text, paths in sorted(places.items())]
    title = kind if kind == REFUSAL else f"`{kind}`"
    return "\n".join([f"## {title}", "", KINDS[kind], "", *rows, ""])


if __name__ == "__main__":
    PAGE.write_text(page())
