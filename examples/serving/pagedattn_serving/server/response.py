"""A sample's text, logprobs and end from its tokens, as they come."""

from dataclasses import dataclass, field

from pagedattn_serving.decoding.request import Reason, Streamed
from pagedattn_serving.server.detokenise import Detokenizer, Stops
from pagedattn_serving.server.text import Text


@dataclass
class Piece:
    """A part of a sample's answer.

    Fields:
      reason: why the answer ends with this piece; None if it goes on.
      tokens: those that the text is made of, if logprobs were asked for; each with the text's
        length in characters before it.
    """

    sample: int
    text: str = ""
    reason: Reason | None = None
    tokens: list[tuple[int, Streamed]] = field(default_factory=list)


class Sample:
    """One sample's reader: `push` each token, and take the piece that is settled, if one is.

    Its text begins with `opening`. No stop string ends it in its first `min_tokens` tokens.
    """

    def __init__(
        self,
        index: int,
        text: Text,
        prompt: tuple[int, ...],
        stop: tuple[str, ...],
        min_tokens: int = 0,
        opening: str = "",
    ):
        self.index, self.min_tokens, self.opening = index, min_tokens, opening
        self.detokenizer, self.stops = Detokenizer(text.decode, prompt), Stops(stop)
        self.num_tokens = 0
        self.reason: Reason | None = None
        self.read = self.passed = 0  # characters that were read and passed on
        self.waiting: list[tuple[int, Streamed]] = []  # tokens whose text was not passed on yet

    def push(self, token: Streamed) -> Piece | None:
        """What can be shown now; None if nothing, or if the sample has ended before."""
        if self.reason:
            return None
        self.num_tokens += 1
        new = ""
        if token.reason != "stop":  # a stop token is no part of the text
            self.waiting.append((self.read, token))
            new = self.detokenizer.push(token.token)
        if token.final:
            new += self.detokenizer.flush()
        self.read += len(new)
        text = self.stops.push(new, early=self.num_tokens <= self.min_tokens)
        if token.final and not self.stops.found:
            text += self.stops.flush()
        self.reason = "stop" if self.stops.found else token.reason
        self.passed += len(text)
        return self._piece(text) if text or self.reason else None

    def _piece(self, text: str) -> Piece:
        """The tokens whose text begins before what is passed on go with it."""
        ended = self.reason and not self.stops.found
        shown = [each for each in self.waiting if ended or each[0] < self.passed]
        self.waiting = self.waiting[len(shown) :]
        opening, self.opening = self.opening, ""
        return Piece(self.index, opening + text, self.reason, shown)


def joined(pieces: list[Piece]) -> Piece:
    """The whole answer of a sample."""
    tokens = [token for piece in pieces for token in piece.tokens]
    return Piece(pieces[0].sample, "".join(p.text for p in pieces), pieces[-1].reason, tokens)


def completion_logprobs(text: Text, piece: Piece) -> dict:
    """As /v1/completions tells them: one list for each fact."""
    streamed = [token for _, token in piece.tokens]
    tops = [[(text.spell(t)[0], logprob) for t, logprob in s.top_logprobs] for s in streamed]
    return {
        "tokens": [text.spell(token.token)[0] for token in streamed],
        "token_logprobs": [token.logprob for token in streamed],
        "top_logprobs": [dict(reversed(top)) for top in tops],  # of equal texts the likeliest
        "text_offset": [offset for offset, _ in piece.tokens],
    }


def chat_logprobs(text: Text, piece: Piece) -> dict:
    """As /v1/chat/completions tells them: a record for each token."""
    content = [
        _record(text, token.token, token.logprob)
        | {"top_logprobs": [_record(text, *top) for top in token.top_logprobs]}
        for _, token in piece.tokens
    ]
    return {"content": content, "refusal": None}


def _record(text: Text, token: int, logprob: float | None) -> dict:
    spelled, spelled_bytes = text.spell(token)
    return {"token": spelled, "logprob": logprob, "bytes": spelled_bytes}
