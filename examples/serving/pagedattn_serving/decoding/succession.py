"""Which sequences of a request follow which: forks of rows, and rows given back."""

from typing import NamedTuple

from pagedattn_serving.blocks.memory import Memory
from pagedattn_serving.decoding.request import NO_ROW, Group, Reason, Sequence


class Choice(NamedTuple):
    """A token chosen to follow one of a group's sequences.

    Fields:
      parent: the index of that sequence in the group.
      token: the token.
      sample, score: those of the new sequence.
      reason: why the sequence ends with this token, or None if it goes on.
    """

    parent: int
    token: int
    sample: int = 0
    score: float = 0.0
    reason: Reason | None = None


def succeed(memory: Memory, group: Group, choices: list[Choice]) -> None:
    """Replaces a group's sequences by those that the choices make of them.

    A parent's first live choice goes on in the parent's row, its others in forks of that row. A
    sequence that no choice names as its parent ends, unfinished.
    """
    parents, live = group.sequences, [choice for choice in choices if not choice.reason]
    group.finished += [_child(parents[c.parent], c, NO_ROW) for c in choices if c.reason]
    survivors = {choice.parent for choice in live}
    give_back(memory, group, [s.row for i, s in enumerate(parents) if i not in survivors])
    rows = [parents[choice.parent].row for choice in live]
    forked = [i for i, row in enumerate(rows) if rows.index(row) < i]
    children = [group.spare_rows.pop() for _ in forked]
    memory.fork([rows[i] for i in forked], children)
    for i, child in zip(forked, children, strict=True):
        rows[i] = child
    chosen = zip(live, rows, strict=True)
    group.sequences = [_child(parents[choice.parent], choice, row) for choice, row in chosen]


def finish(memory: Memory, group: Group, ended: list[Sequence]) -> None:
    """Takes the sequences that have ended out of the live ones, and frees their rows."""
    give_back(memory, group, [sequence.row for sequence in ended])
    group.finished += ended
    group.sequences = [sequence for sequence in group.sequences if not sequence.reason]
    for sequence in ended:
        sequence.row = NO_ROW


def give_back(memory: Memory, group: Group, rows: list[int]) -> None:
    """Frees the blocks of rows, which the group may use for others of its sequences."""
    memory.release(rows)
    group.spare_rows += rows


def _child(parent: Sequence, choice: Choice, row: int) -> Sequence:
    return Sequence(
        [*parent.tokens, choice.token],
        choice.sample,
        choice.score,
        parent.num_cached,
        row,
        keys=list(parent.keys),
        num_kept=parent.num_kept,
        reason=choice.reason,
    )
