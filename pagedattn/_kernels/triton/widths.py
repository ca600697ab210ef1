"""How the columns of keys and values are cut into tiles, whose widths are powers of two."""

from typing import NamedTuple

from ..._dispatch.call import Call

# The widest keys and values: those of latent caches, and of the widest heads in use.
MAX_HEAD_DIM = 576
MAX_VALUE_DIM = 512
# Up to this width keys are padded to one power of two; wider ones are cut into two.
ONE_TILE = 256


class Widths(NamedTuple):
    """Columns of the tiles of one step of keys.

    Fields:
      head_dim: of the keys.
      dims: of the keys' first tile, which in a latent cache holds the values.
      rest: of the keys' second tile; 0 where the first one has all columns.
      value_dim: of the values.
      value_dims: of the values' tile.
      latent: whether that is the keys' first tile.
    """

    head_dim: int
    dims: int
    rest: int
    value_dim: int
    value_dims: int
    latent: bool

    @property
    def query(self) -> int:
        return self.dims + self.rest

    @property
    def loaded(self) -> int:
        """Columns that are loaded for each key."""
        return self.query + (0 if self.latent else self.value_dims)


def widths_of(call: Call) -> Widths:
    """The tiles of a call.

    A latent cache's first tile is at least half of its keys, and holds all values.
    """
    latent = call.value_dim is not None and not call.strides.value
    least = 64 if in_four_bits(call) else 16
    value_dims = max(least, tile_width(call.out_dim))
    dims = max(least, tile_width(call.head_dim))
    if latent or call.head_dim > ONE_TILE:
        dims = max(16, power_of_two(call.head_dim + 1) // 2, value_dims if latent else 0)
    rest = tile_width(call.head_dim - dims) if dims < call.head_dim else 0
    value_dims = dims if latent else value_dims
    return Widths(call.head_dim, dims, rest, call.out_dim, value_dims, latent)


def in_four_bits(call: Call) -> bool:
    """Whether a byte of the cache holds two numbers: tiles are halves and quarters then."""
    return call.cache_dtype == "int4"


def is_wide(call: Call) -> bool:
    """Whether keys or values are wider than those that the other rules were measured with."""
    return max(call.head_dim, widths_of(call).value_dims) > ONE_TILE


def refusals(call: Call) -> list[str]:
    """Why the kernels cannot run a call, by its widths."""
    reasons = []
    if call.head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim must be at most {MAX_HEAD_DIM}, got {call.head_dim}")
    if call.out_dim > MAX_VALUE_DIM:
        reasons.append(f"value_dim must be at most {MAX_VALUE_DIM}, got {call.out_dim}")
    return reasons + (_four_bits(call) if in_four_bits(call) else [])


def _four_bits(call: Call) -> list[str]:
    reasons = []
    if widths_of(call).latent or is_wide(call):
        reasons.append(f"cache_dtype: int4 is read up to {ONE_TILE} columns, and not of latents")
    if call.head_dim % 4 or call.out_dim % 4:
        reasons.append("cache_dtype: int4 needs a multiple of four columns")
    if any(stride % 2 for strides in call.strides[1:] for stride in strides[:3]):
        reasons.append("cache_dtype: int4 needs even strides")
    return reasons


def tile_width(columns: int) -> int:
    """The least width of a tile that holds some columns; products need 16.

    >>> [tile_width(n) for n in (1, 16, 80, 512)]
    [16, 16, 128, 512]
    """
    return max(16, power_of_two(columns))


def power_of_two(length: int) -> int:
    """The least power of two that is not below a length.

    >>> [power_of_two(n) for n in (1, 2, 3, 80, 128)]
    [1, 2, 4, 128, 128]
    """
    return 1 << max(0, length - 1).bit_length()
