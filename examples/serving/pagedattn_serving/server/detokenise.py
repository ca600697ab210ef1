"""Text from tokens, as they come: no half characters, and nothing that may belong to a stop string.

Both readers are fed piece by piece, and what they give out does not depend on the pieces.
"""

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"  # what decoders write for bytes that are no character, or not yet one
MOST_UNFINISHED = 3  # bytes of a UTF-8 character that may come before its last one
CONTEXT = 6  # tokens of the prompt before the new ones: decoders strip a space at a text's start
WINDOW = 32  # tokens that are decoded again and again at most


class Detokenizer:
    """The text of tokens that follow `prompt`; characters that are not complete are held back.

    Tokens are decoded together with those of the last complete characters. They must not follow a
    part of a character: some decoders then mark every byte beside it as invalid.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int] = ()):
        self.decode = decode
        self.tokens = self._end_of(prompt)
        self.num_open = 0  # tokens since the text was complete
        self.sent = len(decode(self.tokens).rstrip(UNFINISHED))  # characters that were given out

    def push(self, token: int) -> str:
        """The text that is complete now and was not before."""
        self.tokens.append(token)
        self.num_open += 1
        text = self.decode(self.tokens)
        end = len(text) - self._held(text)
        new = text[self.sent : end]
        self.sent = max(self.sent, end)
        if new and end == len(text):
            self._keep(self.num_open)
            self.num_open = 0
        elif len(self.tokens) > WINDOW:
            self._keep(CONTEXT)
        return new

    def flush(self) -> str:
        """What was held back and no token will complete."""
        return self.decode(self.tokens)[self.sent :]

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of the prompt, from the beginning of a character on."""
        ends = (list(prompt[-CONTEXT - more :]) for more in range(MOST_UNFINISHED))
        whole = (end for end in ends if not self.decode(end).startswith(UNFINISHED))
        return next(whole, list(prompt[-CONTEXT - MOST_UNFINISHED :]))

    def _keep(self, count: int) -> None:
        """Forgets all but the last tokens."""
        self.tokens = self.tokens[-count:]
        text = self.decode(self.tokens)
        self.sent = len(text) - self._held(text)

    def _held(self, text: str) -> int:
        """How many characters at the end may be another one, once it is complete.

        A byte may be marked by a character, and so may those of the complete ones beside it. After
        more tokens than a character has bytes, some will never be one.
        """
        marked = len(text) - len(text.rstrip(UNFINISHED))
        return marked if self.num_open <= MOST_UNFINISHED else min(marked, MOST_UNFINISHED)


class Stops:
    """Passes text on up to the first of the stop strings; `found` then says that it came.

    The first is the one that ends first, and the longest of those that end there. One that ends in
    text that was pushed `early` is none.
    """

    def __init__(self, stops: Sequence[str]):
        self.stops, self.buffer, self.found = tuple(stops), "", False
        self.num_early = 0  # characters of the buffer in which no stop string ends

    def push(self, text: str, early: bool = False) -> str:
        """The text that can be no part of a stop string; nothing once one was found."""
        if self.found:
            return ""
        self.buffer += text
        if early:
            self.num_early = len(self.buffer)
        found = [(self._find(stop), len(stop)) for stop in self.stops]
        ends = [(start + length, -length) for start, length in found if start >= 0]
        if ends:
            end, length = min(ends)
            self.found, passed = True, self.buffer[: end + length]
            self.buffer = ""
            return passed
        keep = max((self._started(stop) for stop in self.stops), default=0)
        cut = len(self.buffer) - keep
        passed, self.buffer = self.buffer[:cut], self.buffer[cut:]
        self.num_early = max(self.num_early - cut, 0)
        return passed

    def flush(self) -> str:
        """What was held back, when the text ends without a stop string."""
        rest, self.buffer = self.buffer, ""
        return rest

    def _find(self, stop: str) -> int:
        """Where it begins in the buffer, or -1."""
        return self.buffer.find(stop, max(self.num_early - len(stop) + 1, 0))

    def _started(self, stop: str) -> int:
        """The most characters of the buffer's end with which the stop string begins."""
        lengths = range(min(len(stop) - 1, len(self.buffer)), 0, -1)
        return next((n for n in lengths if self.buffer.endswith(stop[:n])), 0)
