"""docs/errors.md has every text: it is current, and what bad calls raise stands on it."""

import importlib.util
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
from fuzzing import replace
from public_calls import CLASSES, CORE, TORCH

from pagedattn import PagedAttentionError

DOCS = Path(__file__).parents[2] / "docs"
CALLS = CORE | TORCH | CLASSES
MODULE = importlib.util.spec_from_file_location("error_page", DOCS / "error_page.py")
assert MODULE
assert MODULE.loader
error_page = importlib.util.module_from_spec(MODULE)
MODULE.loader.exec_module(error_page)


def pattern(template: str) -> re.Pattern:
    constant = re.split(r"{[^{}]*}", template)
    return re.compile(".*".join(map(re.escape, constant)), re.DOTALL)


def raised(name: str, seed: int) -> str | None:
    """What a call says to one bad argument."""
    function, arguments = CALLS[name]()
    argument = sorted(arguments)[seed % len(arguments)]
    arguments[argument] = replace(np.random.default_rng(seed), argument, arguments[argument])[1]
    try:
        function(**arguments)
    except PagedAttentionError as error:
        return str(error)
    return None


def test_the_page_is_current():
    assert (DOCS / "errors.md").read_text() == error_page.page(), "run: python docs/error_page.py"


def test_sums_of_numbers_are_no_texts():
    assert not [text for _, text, _ in error_page.texts() if re.search(r"}\d", text)]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", CALLS)
def test_what_bad_calls_raise_stands_on_the_page(name):
    templates = re.findall(r"^- `` (.*) ``  $", (DOCS / "errors.md").read_text(), re.MULTILINE)
    patterns = [pattern(template) for template in templates]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        texts = {text for seed in range(12) if (text := raised(name, seed))}
    assert texts
    assert not [text for text in texts if not any(p.fullmatch(text) for p in patterns)]
