"""The JSON of answers, whole and in chunks: one format for completions, one for chats."""

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from pagedattn_serving.server.generation import Generation
from pagedattn_serving.server.response import Piece, chat_logprobs, completion_logprobs


@dataclass
class CompletionFormat:
    """What all chunks of an answer have in common."""

    generation: Generation
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    kind, prefix = "text_completion", "cmpl"
    chunk_kind = kind

    def whole(self, pieces: list[Piece]) -> dict:
        """The answer of all choices, from one piece each."""
        choices = [self.choice(piece) for piece in pieces]
        return self._frame(self.kind, choices) | {"usage": self.generation.usage}

    def openings(self) -> Iterator[dict]:
        """Chunks before the first token."""
        return iter(())

    def chunk(self, piece: Piece) -> dict:
        return self._frame(self.chunk_kind, [self.part(piece)]) | self._no_usage

    def closing(self) -> dict:
        """The last chunk, of those who ask for the usage."""
        return self._frame(self.chunk_kind, []) | {"usage": self.generation.usage}

    def choice(self, piece: Piece) -> dict:
        logprobs = self._logprobs(piece, completion_logprobs)
        end = {"logprobs": logprobs, "finish_reason": piece.reason}
        return {"index": piece.sample, "text": piece.text} | end

    def part(self, piece: Piece) -> dict:
        return self.choice(piece)

    @property
    def _no_usage(self) -> dict:
        """With include_usage every chunk has the field, and all but the last are null."""
        return {"usage": None} if self.generation.parameters.include_usage else {}

    def _frame(self, kind: str, choices: list[dict]) -> dict:
        name = {"id": f"{self.prefix}-{self.number}", "object": kind, "created": self.created}
        return name | {"model": self.generation.parameters.model, "choices": choices}

    def _logprobs(self, piece: Piece, logprobs_of) -> dict | None:
        if self.generation.parameters.logprobs is None:
            return None
        return logprobs_of(self.generation.text, piece)


class ChatFormat(CompletionFormat):
    kind, prefix, chunk_kind = "chat.completion", "chatcmpl", "chat.completion.chunk"

    def choice(self, piece: Piece) -> dict:
        return self._with("message", {"role": "assistant", "content": piece.text}, piece)

    def part(self, piece: Piece) -> dict:
        return self._with("delta", {"content": piece.text} if piece.text else {}, piece)

    def openings(self) -> Iterator[dict]:
        for index in range(self.generation.parameters.n):
            opening = Piece(index)
            choice = self._with("delta", {"role": "assistant", "content": ""}, opening)
            choice["logprobs"] = None
            yield self._frame(self.chunk_kind, [choice]) | self._no_usage

    def _with(self, name: str, content: dict, piece: Piece) -> dict:
        logprobs = self._logprobs(piece, chat_logprobs)
        end = {"logprobs": logprobs, "finish_reason": piece.reason}
        return {"index": piece.sample, name: content} | end
