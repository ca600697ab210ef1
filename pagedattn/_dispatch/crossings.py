"""The sizes of a call at which another backend becomes faster, as one record."""

from dataclasses import dataclass, fields

from .._arrays.checks import count
from .._arrays.inspect import shown
from ..errors import InvalidInputError

NEVER = 2**31 - 1  # more than any size of a call


@dataclass(frozen=True, kw_only=True)
class Crossings:
    """By which sizes `backend=None` chooses; the figures of an H200, unless others are given.

    They hold on an H100. `python -m pagedattn --tune` measures those of another GPU, and prints the
    record to pass: `paged_attention(..., backend=Crossings(mosaic_query_len=256))` chooses as None
    does, by these. Frozen and hashable. 2147483647 means never.

    Fields:
      mosaic_query_len: the longest query of a batch from which `mosaic` is ahead of `triton`.
      mosaic_many_query_len: the same in a batch of at least `mosaic_many_seqs` sequences, whose
        table rows have room for `mosaic_many_keys` keys in all.
      mosaic_fewest_decodes, mosaic_most_decodes: sequences x KV heads of decodes between which,
        both included, `mosaic` is ahead in tables with room for more than `mosaic_decode_keys`
        keys a row.
      latent_keys: keys a sequence from which `mosaic` is ahead in decodes over latents; with a
        multiple of 64 heads, in 16 bits, only from `latent_work` on: tokens x query heads x keys.
      cudnn_query_len: the longest query from which `cudnn` is ahead of `triton`, if tokens x keys
        are `cudnn_work` at least.
      sdpa_work: tokens x query heads x head_dim x keys from which `sdpa` is ahead of `xla` on a
        CPU, where Numba is not installed.

    Raises:
      InvalidInputError: a field is no integer of at least 0.

    >>> from pagedattn import Crossings
    >>> Crossings(mosaic_query_len=256).cudnn_query_len
    2048
    """

    mosaic_query_len: int = 128
    mosaic_many_query_len: int = 2
    mosaic_many_seqs: int = 64
    mosaic_many_keys: int = 64 * 4096
    mosaic_fewest_decodes: int = 256
    mosaic_most_decodes: int = 659
    mosaic_decode_keys: int = 2048
    latent_work: int = 1 << 22
    latent_keys: int = 1024
    cudnn_query_len: int = 2048
    cudnn_work: int = 1 << 25
    sdpa_work: int = 1 << 24

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, count(field.name, getattr(self, field.name), 0))

    def __repr__(self) -> str:
        """Only what is not the default: the record as a program writes it."""
        changed = [
            f"{field.name}={value}"
            for field in fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"Crossings({', '.join(changed)})"


def require_crossings(crossings) -> None:
    if not isinstance(crossings, Crossings):
        raise InvalidInputError(f"crossings must be Crossings, got {shown(crossings)}")
