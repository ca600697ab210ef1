"""Requests, and the sequences that answer them."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float

NO_ROW = -1  # the row of a sequence that is not in the pool
Logits = Float[np.ndarray, " vocab_size"]
Reason = Literal["stop", "length"]  # why a sample ends: at a stop token, or at its full length


class Choice(NamedTuple):
    """A token chosen to follow one of a group's sequences.

    Fields:
      parent: the index of that sequence in the group.
      token: the token.
      sample: which of the request's samples the new sequence is.
      score: the new sequence's log-probability; in beam search only.
      reason: why the sequence ends with this token, or None if it goes on.
      logprob, top_logprobs: as in `Streamed`.
    """

    parent: int
    token: int
    sample: int = 0
    score: float = 0.0
    reason: Reason | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()

    @property
    def final(self) -> bool:
        return self.reason is not None


class Decoding(Protocol):
    """How a request's tokens are chosen: `sampling.Sampling` or `beam.Beam`."""

    @property
    def width(self) -> int:
        """How many sequences a request may have at a time."""
        ...

    def choose(self, group: "Group", stop_tokens: tuple[int, ...]) -> list[Choice]:
        """The next tokens of a group whose sequences all have their logits.

        A sequence that no choice names as its parent ends, unfinished.
        """
        ...

    def settled(self, group: "Group", choices: list[Choice]) -> list["Streamed"]:
        """The tokens of this step that no later one takes back."""
        ...

    def ranked(self, group: "Group") -> list["Sequence"]:
        """The finished sequences that make up the answer, best or first sample first."""
        ...


class Streamed(NamedTuple):
    """A token of an answer, handed out as soon as no later step can take it back.

    Fields:
      request: the request's id.
      token: the token.
      sample: which of the request's samples it belongs to; of beams the best is sample 0.
      final: whether the sample ends with this token.
      reason: why it does: "stop" if the token is a stop token, else "length"; None if it does not.
      logprob: the natural log of the token's probability under the model's own distribution, before
        temperature, top_k and top_p; None unless `Sampling.logprobs` asks for it.
      top_logprobs: (token, logprob) of the likeliest tokens there, as many as `Sampling.logprobs`
        says, the likeliest first.
    """

    request: int
    token: int
    sample: int = 0
    final: bool = False
    reason: Reason | None = None
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Request:
    """A prompt to continue; the id is the caller's, from 0 up, and unique."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    decoding: Decoding

    @property
    def max_cached(self) -> int:
        """The most tokens of a sequence in the cache: all but the last, which is never fed."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass
class Sequence:
    """One sequence of a request.

    Fields:
      tokens: the prompt and what has been generated.
      sample, score, reason: as in `Choice`.
      num_cached: how many of the tokens the cache holds.
      row, host_row: its row in the device's pool and in the host's, or `NO_ROW`.
      keys: the prefix cache's names of its full blocks.
      logits: those after its last token; empty until they are computed.
    """

    tokens: list[int]
    sample: int = 0
    score: float = 0.0
    num_cached: int = 0
    row: int = NO_ROW
    host_row: int = NO_ROW
    keys: list[bytes] = field(default_factory=list)
    logits: Logits = field(default_factory=lambda: np.empty(0))
    reason: Reason | None = None

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_cached

    def followed_by(self, choice: Choice, row: int) -> "Sequence":
        """A new sequence: this one and the chosen token, in row `row`."""
        return Sequence(
            [*self.tokens, choice.token],
            choice.sample,
            choice.score,
            self.num_cached,
            row,
            keys=list(self.keys),
            reason=choice.reason,
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
        """Whether all sequences have the logits after their last token."""
        return all(sequence.logits.size for sequence in self.sequences)

    @property
    def rows(self) -> list[int]:
        return [sequence.row for sequence in self.sequences if sequence.row != NO_ROW]

    def completion(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[len(self.request.prompt) :]

    def completions(self) -> list[list[int]]:
        """The answer; complete when no sequence is live."""
        return [self.completion(sequence) for sequence in self.request.decoding.ranked(self)]
