"""Text from tokens, as they come: no half characters, and nothing that may belong to a stop string.

Both readers are fed piece by piece, and what they give out does not depend on the pieces.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what decoders write for bytes that are no character, or not yet one
MOST_UNFINISHED = 3  # bytes of a UTF-8 character that may come before its last one
CONTEXT = 6  # tokens before the new ones: decoders strip a space at the start of a text
WINDOW = 32  # tokens that are decoded again and again at most


class Detokenizer:
    """The text of tokens that follow `prompt`; characters that are not complete are held back."""

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self.decode = decode
        self.tokens: list[int] = list(prompt[-CONTEXT:])
        self.sent = len(decode(self.tokens))  # characters of the window that were given out

    def push(self, token: int) -> str:
        """The text that is complete now and was not before."""
        self.tokens.append(token)
        text = self.decode(self.tokens)
        end = len(text) - self._held(text)
        new = text[self.sent : end]
        self.sent = max(self.sent, end)
        if (new and end == len(text)) or len(self.tokens) > WINDOW:
            self.tokens = self.tokens[-CONTEXT:]
            text = self.decode(self.tokens)
            self.sent = len(text) - self._held(text)
        return new

    def flush(self) -> str:
        """What was held back and no token will complete."""
        return self.decode(self.tokens)[self.sent :]

    @staticmethod
    def _held(text: str) -> int:
        return min(len(text) - len(text.rstrip(UNFINISHED)), MOST_UNFINISHED)


class Stops:
    """Passes text on up to the first of the stop strings; `found` then says that it came.

    The first is the one that ends first, and the longest of those that end there.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops, self.buffer, self.found = tuple(stops), "", False

    def push(self, text: str) -> str:
        """The text that can be no part of a stop string; nothing once one was found."""
        if self.found:
            return ""
        self.buffer += text
        ends = [(self.buffer.find(stop) + len(stop), -len(stop)) for stop in self._inside()]
        if ends:
            end, length = min(ends)
            self.found, passed = True, self.buffer[: end + length]
            self.buffer = ""
            return passed
        keep = max((self._started(stop) for stop in self.stops), default=0)
        cut = len(self.buffer) - keep
        passed, self.buffer = self.buffer[:cut], self.buffer[cut:]
        return passed

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        rest, self.buffer = self.buffer, ""
        return rest

    def _inside(self) -> list[str]:
        return [stop for stop in self.stops if stop in self.buffer]

    def _started(self, stop: str) -> int:
        """The most characters of the buffer's end with which the stop string begins."""
        lengths = range(min(len(stop) - 1, len(self.buffer)), 0, -1)
        return next((n for n in lengths if self.buffer.endswith(stop[:n])), 0)
