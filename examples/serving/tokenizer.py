"""Text to tokens and back: bytes, or the checkpoint's own `tokenizer.json`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Tokenizer:
    """A pair of functions; `decode` undoes `encode`, except for special tokens."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


BYTES = Tokenizer(
    encode=lambda text: list(text.encode()),
    decode=lambda tokens: bytes(tokens).decode(errors="replace"),
)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer beside a checkpoint; bytes where there is none."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return BYTES
    import tokenizers  # pip install tokenizers

    theirs = tokenizers.Tokenizer.from_file(str(path))
    return Tokenizer(encode=lambda text: theirs.encode(text).ids, decode=theirs.decode)
