"""Beam search on forks: sequences that split share their blocks, those that end free them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from serving.request import Choice, Group, Sequence, Streamed


@dataclass(frozen=True)
class Beam:
    """The `num_beams` likeliest completions that breadth-first search finds.

    A completion that stops leaves the beam. The search is over when `num_beams` have stopped. These
    are ranked by log-probability divided by `length ** length_penalty`.
    """

    num_beams: int
    length_penalty: float = 1.0

    @property
    def width(self) -> int:
        return self.num_beams

    def choose(self, group: Group, stop_tokens: tuple[int, ...]) -> list[Choice]:
        final, live = [], []
        for rank, (parent, token, score) in enumerate(self._best(group)):
            if token in stop_tokens:
                if rank < self.num_beams:
                    final.append(Choice(parent, token, rank, score, "stop"))
            elif len(live) < self.num_beams:
                live.append(Choice(parent, token, len(live), score))
        over = len(group.finished) + len(final) >= self.num_beams
        return final if over else final + live

    def settled(self, group: Group, choices: list[Choice]) -> list[Streamed]:
        """Nothing until the search is over, then the best completion."""
        del choices
        if group.sequences:
            return []
        best = self.ranked(group)[0]
        *tokens, last = (Streamed(group.request.id, token) for token in group.completion(best))
        return [*tokens, last._replace(final=True, reason=best.reason)]

    def ranked(self, group: Group) -> list[Sequence]:
        def quality(sequence: Sequence) -> float:
            return sequence.score / len(group.completion(sequence)) ** self.length_penalty

        return sorted(group.finished, key=quality, reverse=True)[: self.num_beams]

    def _best(self, group: Group) -> list[tuple[int, int, float]]:
        """(parent, token, score) of the best candidates: `2 * num_beams`, as that many may stop."""
        scores = np.stack([s.score + log_softmax(s.logits) for s in group.sequences])
        order = np.argsort(-scores, axis=None, kind="stable")[: 2 * self.num_beams]
        parents, tokens = np.unravel_index(order, scores.shape)
        return [(int(p), int(t), float(scores[p, t])) for p, t in zip(parents, tokens, strict=True)]


def log_softmax(logits: Float[np.ndarray, " vocab_size"]) -> Float[np.ndarray, " vocab_size"]:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
