"""The columns of latents, cut into loads: all are keys' columns, the first ones values' too."""

from ..kernel_config import HEAD_DIM, VALUE_DIM

CHUNK = 192
PIECE = 64  # of the queries and the results, which lie together in memory
PIECES = HEAD_DIM // PIECE
CHUNKS = HEAD_DIM // CHUNK


def pieces(chunk: int, count: int = CHUNK):
    """The pieces among the first columns of a chunk, and where they begin there."""
    return [((chunk * CHUNK + begin) // PIECE, begin) for begin in range(0, count, PIECE)]


def value_columns(chunk: int) -> int:
    """How many columns of a chunk, its first ones, are values'."""
    return min(CHUNK, VALUE_DIM - chunk * CHUNK)
