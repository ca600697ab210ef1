"""A padded batch as the tokens that are real, and the form in which transformers hands it on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pagedattn import UnsupportedError


@dataclass(frozen=True, eq=False)
class Rows:
    """A padded batch of one forward pass, worked out once for all layers.

    Fields:
      queries, keys: the indices of the real tokens, with the batch's axes flattened.
      query_starts, key_starts: sequence s has the real tokens from entry s up to entry s + 1.
      max_query_len, max_key_len: the padded lengths.
      causal, window: what the mask shows, of the tokens that are real.
    """

    queries: Tensor
    keys: Tensor
    query_starts: Tensor
    key_starts: Tensor
    max_query_len: int
    max_key_len: int
    causal: bool
    window: int | None


class Mask(Tensor):
    """Rows that pass for a finished mask: `[batch, 1, q_length, kv_length]`, without any memory.

    `generate` makes the masks of a static cache itself and hands them to the model, which takes a
    tensor of four dimensions as it is and would read any other object as padding.
    """

    rows: Rows

    @staticmethod
    def __new__(cls, rows: Rows) -> "Mask":
        sizes = (len(rows.query_starts) - 1, 1, rows.max_query_len, rows.max_key_len)
        where = {"dtype": torch.bool, "device": rows.keys.device}
        mask = Tensor._make_wrapper_subclass(cls, sizes, **where)
        mask.rows = rows
        return mask

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        raise UnsupportedError(
            f"pagedattn's masks hold lengths and no numbers, and this model computes with its mask "
            f"({operator}): set_attn_implementation('sdpa') or 'eager' runs it"
        )

    def contiguous(self, *_: Any, **__: Any) -> "Mask":
        return self

    def to(self, *_: Any, **__: Any) -> "Mask":
        return self

    def __repr__(self, **_: Any) -> str:
        return f"Mask({self.rows})"


def rows_of(queries: Tensor, keys: Tensor, causal: bool, window: int | None) -> Rows:
    """The rows of a batch whose real tokens are marked, bool `[batch, length]` of both."""
    return Rows(
        queries=queries.flatten().nonzero()[:, 0],
        keys=keys.flatten().nonzero()[:, 0],
        query_starts=_starts(queries),
        key_starts=_starts(keys),
        max_query_len=queries.shape[1],
        max_key_len=keys.shape[1],
        causal=causal,
        window=window,
    )


def _starts(real: Tensor) -> Tensor:
    ends = real.sum(1).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
