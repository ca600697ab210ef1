"""Requests, and the sequences that answer them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from pagedattn_serving.blocks.memory import Memory

NO_ROW = -1  # the row of a sequence that is not in the pool
IN_FLIGHT = -1  # stands for a token that the device chooses, and that the host has not read yet
NO_TOKEN = -2  # what is chosen where the model computes NaN
# Why a sample ends: at a stop token, at its full length, or because the model computes NaN.
Reason = Literal["stop", "length", "error"]
Scored = tuple[tuple[int, float], ...]  # tokens and their log-probabilities, the likeliest first


class Settings(NamedTuple):
    """How the device chooses a token.

    Fields:
      temperature, seed, top_k, top_p: as in `sampling.Sampling`.
      num_top: how many of the likeliest tokens the host is told.
      scored: whether the host is told log-probabilities at all.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int | None = None
    top_p: float = 1.0
    num_top: int = 0
    scored: bool = False

    @property
    def narrows(self) -> bool:
        return self.temperature > 0 and (self.top_k is not None or self.top_p < 1)


class Draw(NamedTuple):
    """A token that the device is to choose once a forward has run.

    Fields:
      group, sequence: whose it will be.
      row: the sequence's row.
      source: the row after whose last token it comes: the sequence's own, or its parent's.
      position: the token's index in the sequence.
      banned: tokens that it must not be.
    """

    group: "Group"
    sequence: "Sequence"
    row: int
    source: int
    position: int
    banned: tuple[int, ...] = ()


class Found(NamedTuple):
    """What the host reads of a draw: the token, its log-probability, and the likeliest tokens."""

    token: int
    logprob: float | None = None
    top: Scored = ()


class Turn(NamedTuple):
    """What a decoding works on.

    Fields:
      group: a request under way.
      memory: where its sequences lie.
      stop_tokens: the model's.
    """

    group: "Group"
    memory: "Memory"
    stop_tokens: tuple[int, ...]


class Decoding(Protocol):
    """How a request's tokens are chosen: `sampling.Sampling` or `beam.Beam`."""

    @property
    def width(self) -> int:
        """How many sequences a request may have at a time."""
        ...

    @property
    def settings(self) -> Settings:
        """What the device has to know."""
        ...

    def draw(self, turn: Turn, ready: list["Sequence"]) -> list[Draw]:
        """The draws after a forward that feeds the last tokens of the sequences `ready`."""
        ...

    def read(self, turn: Turn, found: list[tuple["Sequence", Found]]) -> list["Streamed"]:
        """Takes in what was drawn for sequences; gives the tokens that no later step takes back.

        A group that has no more sequences is done.
        """
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
      reason: why it does: "stop" if the token is a stop token, "error" if there is `NO_TOKEN`, else
        "length"; None if it does not.
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
    top_logprobs: Scored = ()


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
      tokens: the prompt and what has been generated; the last two may be `IN_FLIGHT`.
      sample: which of the request's samples it is.
      score: its log-probability; in beam search only.
      num_cached: how many of the tokens the cache holds once the device has caught up.
      row, host_row: its row in the device's pool and in the host's, or `NO_ROW`.
      keys: the prefix cache's names of its full blocks; it was offered the first `num_kept`.
      candidates: the likeliest next tokens, once they are known; in beam search only.
      reason: why it has ended, if it has.
    """

    tokens: list[int]
    sample: int = 0
    score: float = 0.0
    num_cached: int = 0
    row: int = NO_ROW
    host_row: int = NO_ROW
    keys: list[bytes] = field(default_factory=list)
    num_kept: int = 0
    candidates: Scored = ()
    reason: Reason | None = None

    @property
    def num_known(self) -> int:
        """How many tokens the host knows."""
        return len(self.tokens) - self.tokens[-2:].count(IN_FLIGHT)


@dataclass
class Group:
    """A request under way: its live sequences, the finished ones, and its unused rows."""

    request: Request
    sequences: list[Sequence]
    finished: list[Sequence] = field(default_factory=list)
    spare_rows: list[int] = field(default_factory=list)

    def num_pending(self, sequence: Sequence) -> int:
        """How many tokens are still to be fed; the last of a full sequence never is."""
        return min(len(sequence.tokens), self.request.max_cached) - sequence.num_cached

    @property
    def rows(self) -> list[int]:
        return [sequence.row for sequence in self.sequences if sequence.row != NO_ROW]

    def completion(self, sequence: Sequence) -> list[int]:
        return sequence.tokens[len(self.request.prompt) :]

    def completions(self) -> list[list[int]]:
        """The answer; complete when no sequence is live."""
        return [self.completion(sequence) for sequence in self.request.decoding.ranked(self)]
