"""Beam search on forks: sequences that split share their blocks, those that end free them."""

from dataclasses import dataclass

from pagedattn_serving.decoding.request import (
    Draw,
    Found,
    Group,
    Sequence,
    Settings,
    Streamed,
    Turn,
)
from pagedattn_serving.decoding.succession import Choice, succeed


@dataclass(frozen=True)
class Beam:
    """The `num_beams` likeliest completions that breadth-first search finds.

    A completion that stops leaves the beam. The search is over when `num_beams` have stopped. These
    are ranked by log-probability divided by `length ** length_penalty`.

    The host decides which hypotheses go on, so a request waits until each step's candidates are
    there: as many of every hypothesis as may stop and go on together.
    """

    num_beams: int
    length_penalty: float = 1.0

    @property
    def width(self) -> int:
        return self.num_beams

    @property
    def settings(self) -> Settings:
        return Settings(num_top=2 * self.num_beams, scored=True)

    def draw(self, turn: Turn, ready: list[Sequence]) -> list[Draw]:
        """The candidates of each; nothing goes on before they are read."""
        return [Draw(turn.group, s, s.row, s.row, len(s.tokens)) for s in ready]

    def read(self, turn: Turn, found: list[tuple[Sequence, Found]]) -> list[Streamed]:
        """Nothing until the search is over, then the best completion."""
        group, memory, stop_tokens = turn
        for sequence, new in found:
            sequence.candidates = new.top
        if not all(sequence.candidates for sequence in group.sequences):
            return []  # some are computed anew after a preemption
        succeed(memory, group, self.choose(group, stop_tokens))
        return [] if group.sequences else self._best_streamed(group)

    def choose(self, group: Group, stop_tokens: tuple[int, ...]) -> list[Choice]:
        """What follows the sequences of a group whose candidates are all known."""
        full = len(group.completion(group.sequences[0])) + 1 == group.request.max_new_tokens
        final, live = [], []
        for rank, (parent, token, score) in enumerate(self._best(group)):
            if token in stop_tokens:
                if rank < self.num_beams:
                    final.append(Choice(parent, token, rank, score, "stop"))
            elif len(live) < self.num_beams:
                reason = "length" if full else None
                live.append(Choice(parent, token, len(live), score, reason))
        over = len(group.finished) + len(final) >= self.num_beams
        return final if over else final + live

    def ranked(self, group: Group) -> list[Sequence]:
        def quality(sequence: Sequence) -> float:
            return sequence.score / len(group.completion(sequence)) ** self.length_penalty

        return sorted(group.finished, key=quality, reverse=True)[: self.num_beams]

    def _best(self, group: Group) -> list[tuple[int, int, float]]:
        """(parent, token, score) of the best candidates: `2 * num_beams`, as that many may stop."""
        scored = [
            (parent, token, sequence.score + logprob)
            for parent, sequence in enumerate(group.sequences)
            for token, logprob in sequence.candidates
        ]
        return sorted(scored, key=lambda candidate: -candidate[2])[: 2 * self.num_beams]

    def _best_streamed(self, group: Group) -> list[Streamed]:
        best = self.ranked(group)[0]
        *tokens, last = (Streamed(group.request.id, token) for token in group.completion(best))
        return [*tokens, last._replace(final=True, reason=best.reason)]
