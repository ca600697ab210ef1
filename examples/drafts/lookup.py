"""Drafts by prompt lookup: earlier text that ends like the last tokens do says how they go on.

A character of text is a token here, so that Python searches the text.
"""

from typing import NamedTuple

import numpy as np


class Drafts(NamedTuple):
    """The last token of a text, and what may follow it."""

    tokens: list[int]
    parents: list[int]

    def child(self, at: int, token: int) -> int | None:
        """The index of the draft that follows draft `at` with a token."""
        pairs = enumerate(zip(self.tokens, self.parents, strict=True))
        return next((index for index, pair in pairs if pair == (token, at)), None)

    def path(self, chosen: list[int]) -> list[int]:
        """The line that a model follows which chooses `chosen[i]` after draft i.

        >>> Drafts([5, 7, 8, 9], [-1, 0, 0, 2]).path([8, 0, 9, 6])
        [0, 2, 3]
        """
        path = [0] if self.tokens else []
        while path and (child := self.child(path[-1], chosen[path[-1]])) is not None:
            path.append(child)
        return path


def look_up(text: str, lines: int, depth: int) -> Drafts:
    """At most so many continuations of so many tokens, as a tree; the likeliest one is the first.

    >>> look_up("abc abd ab", 1, 2)._replace(tokens=[]), len(look_up("abc abd ab", 3, 2).tokens)
    (Drafts(tokens=[], parents=[-1, 0, 1]), 5)
    """
    drafts = Drafts([ord(text[-1])], [-1])
    for line in continuations(text, lines):
        at = 0
        for token in map(ord, line[:depth]):
            child = drafts.child(at, token)
            if child is None:
                child = len(drafts.tokens)
                drafts.tokens.append(token)
                drafts.parents.append(at)
            at = child
    return drafts


def continuations(text: str, most: int) -> list[str]:
    """What followed where the last three tokens stood, or two or one; the latest place first.

    >>> continuations("abc abd ab", 3)
    ['d ab', 'c abd ab']
    """
    found: list[str] = []
    for length in (3, 2, 1):
        at = len(text) - length
        while len(found) < most and (at := text.rfind(text[-length:], 0, at + length - 1)) >= 0:
            if (line := text[at + length :]) not in found:
                found.append(line)
    return found


def packed(rows: list[list[int]], most: int) -> np.ndarray:
    """The rows one after the other, and padding; as many numbers whatever the rows' lengths are."""
    flat = [number for row in rows for number in row]
    return np.array(flat + [0] * (len(rows) * most - len(flat)), np.int32)
