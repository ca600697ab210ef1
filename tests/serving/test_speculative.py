"""Drafts by prompt lookup, as chains and as trees: the tokens of plain decoding."""

import re

import pytest
import speculative as example
from drafts.lookup import Drafts, look_up
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.usefixtures("exact_products")


def test_all_prompts_give_the_tokens_of_plain_decoding(capsys, monkeypatch):
    assert example.main(24, example.PROMPTS) == 0
    printed = capsys.readouterr().out
    a_step = {mode: float(tokens) for mode, tokens in re.findall(r"(\w+): ([\d.]+)", printed)}
    assert a_step["plain"] == 1 < a_step["chains"] < a_step["trees"]

    path = Drafts.path  # that of a model which chooses the latest draft, whatever it is

    def last(drafts, chosen):
        return path(drafts, chosen)[:1] + [*range(1, len(drafts.tokens))][-1:]

    monkeypatch.setattr(Drafts, "path", last)
    assert example.main(8, example.PROMPTS[:2]) == 1  # so the program notices


@given(text=st.text("ab", min_size=1), lines=st.integers(0, 4), depth=st.integers(0, 5))
def test_drafts_are_lines_of_the_text(text, lines, depth):
    tokens, parents = drafts = look_up(text, lines, depth)
    assert len(tokens) <= 1 + lines * depth
    assert all(parent < index for index, parent in enumerate(parents))
    assert len({*zip(tokens, parents, strict=True)}) == len(tokens)  # no line is there twice
    for index in range(len(tokens)):
        line, at = "", index
        while at >= 0:
            line, at = chr(tokens[at]) + line, parents[at]
        assert line in text
        following = dict(zip(line_of(drafts, index), map(ord, line[1:]), strict=False))
        path = drafts.path([following.get(i, -1) for i in range(len(tokens))])
        assert path == line_of(drafts, index)


def line_of(drafts: Drafts, index: int) -> list[int]:
    """The indices from the first token to one."""
    line = [index]
    while (parent := drafts.parents[line[0]]) >= 0:
        line.insert(0, parent)
    return line
