"""Completions drawn token by token, each for itself."""

import math
from dataclasses import dataclass
from functools import partial

from pagedattn import InvalidInputError
from pagedattn_serving.decoding.request import (
    IN_FLIGHT,
    Draw,
    Found,
    Group,
    Reason,
    Sequence,
    Settings,
    Streamed,
    Turn,
)
from pagedattn_serving.decoding.succession import Choice, finish, succeed

MAX_LOGPROBS = 20  # a request may ask for the likeliest tokens, up to so many


@dataclass(frozen=True)
class Sampling:
    """`num_samples` independent completions; they share the prompt's blocks.

    Fields:
      temperature: 0 takes the likeliest token, whatever `top_k` and `top_p` are.
      num_samples: how many completions.
      seed: of the noise, from 0 to 2 ** 31 - 1; the same seed gives the same completions.
      top_k: draw from the `top_k` likeliest tokens alone; None for all.
      top_p: draw from the likeliest tokens alone whose probabilities come to `top_p`; 1 for all.
      logprobs: hand out each token's log-probability and those of so many likeliest tokens, from 0
        to `MAX_LOGPROBS`; None for neither.
      ignore_eos: do not end at the model's stop tokens.
      stop_tokens: end at these too.
      min_tokens: no token before which so many were generated ends the completion: those that
        would are not drawn.

    Raises:
      InvalidInputError: A value is out of its range.
    """

    temperature: float = 0.0
    num_samples: int = 1
    seed: int = 0
    top_k: int | None = None
    top_p: float = 1.0
    logprobs: int | None = None
    ignore_eos: bool = False
    stop_tokens: tuple[int, ...] = ()
    min_tokens: int = 0

    def __post_init__(self):
        require = {
            "temperature": 0 <= self.temperature < math.inf,
            "num_samples": self.num_samples >= 1,
            "seed": 0 <= self.seed < 1 << 31,
            "top_k": self.top_k is None or self.top_k >= 1,
            "top_p": 0 < self.top_p <= 1,
            "logprobs": self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "stop_tokens": all(token >= 0 for token in self.stop_tokens),
            "min_tokens": self.min_tokens >= 0,
        }
        if wrong := [name for name, holds in require.items() if not holds]:
            got = ", ".join(f"{name}={getattr(self, name)}" for name in wrong)
            raise InvalidInputError(f"out of range: {got}; the fields of Sampling say the ranges")

    @property
    def width(self) -> int:
        return self.num_samples

    @property
    def settings(self) -> Settings:
        how = (self.temperature, self.seed, self.top_k, self.top_p)
        return Settings(*how, num_top=self.logprobs or 0, scored=self.logprobs is not None)

    def draw(self, turn: Turn, ready: list[Sequence]) -> list[Draw]:
        """One for each sequence; after the prompt, one for each sample.

        The sequences go on at once: the next forward takes the tokens from the device.
        """
        if not ready:
            return []
        group, memory, stop_tokens = turn
        last = len(ready[0].tokens)
        if last == len(group.request.prompt):
            source = ready[0].row
            samples = range(self.num_samples)
            succeed(memory, group, [Choice(0, IN_FLIGHT, sample) for sample in samples])
            banned = self._banned(group.request, last, stop_tokens)
            return [Draw(group, s, s.row, source, last, banned) for s in group.sequences]
        for sequence in ready:
            sequence.tokens.append(IN_FLIGHT)
        at = [(s, len(s.tokens) - 1) for s in ready]
        banned = partial(self._banned, group.request, stop_tokens=stop_tokens)
        return [Draw(group, s, s.row, s.row, position, banned(position)) for s, position in at]

    def read(self, turn: Turn, found: list[tuple[Sequence, Found]]) -> list[Streamed]:
        """Every token; what was drawn after a stop token is dropped with its sequence."""
        (group, memory, stop_tokens), streamed = turn, []
        for sequence, new in found:
            known = sequence.num_known
            sequence.tokens[known] = new.token
            sequence.reason = self._reason(group.request, known + 1, new.token, stop_tokens)
            if sequence.reason:
                del sequence.tokens[known + 1 :]
            streamed.append(self._streamed(group.request.id, sequence, new))
        finish(memory, group, [sequence for sequence, _ in found if sequence.reason])
        return streamed

    def ranked(self, group: Group) -> list[Sequence]:
        return sorted(group.finished, key=lambda sequence: sequence.sample)

    def _streamed(self, request_id: int, sequence: Sequence, new: Found) -> Streamed:
        reason = sequence.reason
        streamed = Streamed(request_id, new.token, sequence.sample, reason is not None, reason)
        if self.logprobs is None:
            return streamed
        return streamed._replace(logprob=new.logprob, top_logprobs=new.top[: self.logprobs])

    def _reason(self, request, length: int, token: int, stop_tokens) -> Reason | None:
        early = self._banned(request, length - 1, stop_tokens)
        if token in self._ends(stop_tokens) and token not in early:
            return "stop"
        return "length" if length == len(request.prompt) + request.max_new_tokens else None

    def _banned(self, request, position: int, stop_tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that must not be at a position: none, once the completion may end."""
        early = position - len(request.prompt) < self.min_tokens
        return self._ends(stop_tokens) if early else ()

    def _ends(self, stop_tokens: tuple[int, ...]) -> tuple[int, ...]:
        """The tokens that end a completion; `stop_tokens` are the model's."""
        return self.stop_tokens if self.ignore_eos else stop_tokens + self.stop_tokens


GREEDY = Sampling()
