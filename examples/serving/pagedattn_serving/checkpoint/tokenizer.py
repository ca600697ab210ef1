"""Text to tokens and back: bytes, or the checkpoint's own `tokenizer.json`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pagedattn import InvalidInputError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"


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
    path = directory / TOKENIZER
    if not path.exists():
        return BYTES
    theirs = read_tokenizer(path)
    return Tokenizer(encode=lambda text: theirs.encode(text).ids, decode=theirs.decode)


def read_tokenizer(path: Path) -> "tokenizers.Tokenizer":
    """A tokenizer that takes texts as they are; InvalidInputError if the file holds none."""
    import tokenizers  # pip install tokenizers

    try:
        theirs = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises nothing narrower
        raise InvalidInputError(f"{path} is no tokenizer: {error}") from error
    theirs.no_truncation()  # such as training may leave in the file
    theirs.no_padding()
    return theirs
