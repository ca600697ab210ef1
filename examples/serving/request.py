"""What is asked, and the sequences that answer it."""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

NO_ROW = -1  # of a sequence that is not in the pool
Logits = Float[np.ndarray, " vocab_size"]


class Choice(NamedTuple):
    """A token to go on with: behind which of a group's sequences, and what becomes of it."""

    parent: int
    token: int
    sample: int = 0
    score: float = 0.0
    final: bool = False  # whether the sequence ends with it


class Decoding(Protocol):
    """How a request's tokens are chosen: `sampling.Sampling` or `beam.Beam`."""

    @property
    def width(self) -> int:
        """How many sequences a request may have at a time."""
        ...

    def choose(self, group: "Group", stop_tokens: tuple[int, ...]) -> list[Choice]:
        """The next tokens of the group, whose sequences all have their logits.

        A sequence that no choice names as its parent ends, unfinished.
        """
        ...

    def settled(self, group: "Group", choices: list[Choice]) -> list[tuple[int, int]]:
        """The (sample, token) pairs of this step that no later one takes back."""
        ...

    def ranked(self, group: "Group") -> list["Sequence"]:
        """The finished sequences that are the answer, in its order."""
        ...


class Streamed(NamedTuple):
    """A token of an answer, as soon as it is certain."""

    request: int
    token: int
    sample: int = 0


@dataclass(frozen=True)
class Request:
    """A prompt to continue; the id is the caller's, from 0 up, and unique."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    decoding: Decoding

    @property
    def max_cached(self) -> int:
        """The worst case of a sequence: all but the last token, which is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass
class Sequence:
    """Tokens, how many of them the cache holds, and in which row of which pool.

    `keys` are the prefix cache's names of its full blocks; `logits` wait for the group's choice;
    they are empty until they are computed.
    """

    tokens: list[int]
    sample: int = 0
    score: float = 0.0
    num_cached: int = 0
    row: int = NO_ROW
    host_row: int = NO_ROW
    keys: list[bytes] = field(default_factory=list)
    logits: Logits = field(default_factory=lambda: np.empty(0))

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_cached

    def followed_by(self, choice: Choice, row: int) -> "Sequence":
        """This sequence and one more token, in a row of its own."""
        return Sequence(
            [*self.tokens, choice.token],
            choice.sample,
            choice.score,
            self.num_cached,
            row,
            keys=list(self.keys),
        )


@dataclass
class Group:
    """A request under way: its live sequences, the finished ones, and its unused rows."""

    request: Request
    sequences: list[Sequence]
    finished: list[Sequence] = field(default_factory=list)
    spare_rows: list[int] = field(default_factory=list)

    @property
    def ready(self) -> bool:
        """Whether all sequences have been through the model up to their last token."""
        return all(sequence.logits.size for sequence in self.sequences)

    @property
    def rows(self) -> list[int]:
        return [sequence.row for sequence in self.sequences if sequence.row != NO_ROW]

    def completion(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[len(self.request.prompt) :]

    def completions(self) -> list[list[int]]:
        """The answer, as soon as no sequence is live."""
        return [self.completion(sequence) for sequence in self.request.decoding.ranked(self)]
