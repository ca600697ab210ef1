"""Packed queries as a rectangle, a row for each sequence, and the way of results back to tokens."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from pagedattn._dispatch.call import Call
from pagedattn.batch.metadata import Sequences
from pagedattn.masks import sees_a_key


class Rectangle:
    """Queries of every sequence in rows of one length; rows without a query are padding.

    Row number r of a sequence, for r in `span`, holds its query number `first + r`.
    """

    def __init__(self, call: Call, batch: Sequences, first: Int[Tensor, "num_seqs"], span: range):
        self.call = call
        numbers = first[:, None] + torch.arange(span.start, span.stop, device=first.device)
        self.tokens = batch.query_start_loc[:-1, None] + numbers
        self.positions = batch.context_lens[:, None] + numbers
        live = (numbers >= 0) & (self.tokens < batch.query_start_loc[1:, None])
        # Inside jit nobody has checked the starts.
        live &= (self.tokens >= 0) & (self.tokens < call.num_tokens)
        self.seeing = live & sees_a_key(
            self.positions, batch.seq_lens[:, None], call.spec.causal, call.window
        )

    def of(
        self, query: Float[Tensor, "num_tokens num_heads head_dim"]
    ) -> Float[Tensor, "num_seqs rows num_heads head_dim"]:
        """The rectangle of the queries: `[num_seqs, rows, num_heads, head_dim]`."""
        tokens = self.tokens.clamp(0, self.call.num_tokens - 1)
        return query.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)

    def write(self, room, results) -> None:
        """Writes rows that see a key to their tokens, the others to the spare last row."""
        rows = torch.where(self.seeing, self.tokens, self.call.num_tokens).flatten()
        for part, result in zip(room, results, strict=True):
            part.index_copy_(0, rows, result.to(part.dtype))


def room_for(
    call: Call, query: Float[Tensor, "num_tokens num_heads head_dim"]
) -> tuple[
    Float[Tensor, "num_tokens+1 num_heads head_dim"], Float[Tensor, "num_tokens+1 num_heads"]
]:
    """out and lse as for tokens that see no key, and one spare row, to be thrown away."""
    num_rows = call.num_tokens + 1
    lse = query.new_full((num_rows, call.num_heads), -torch.inf, dtype=torch.float32)
    return query.new_zeros(num_rows, *call.out_shape[1:]), lse


def tokens_of(room):
    return tuple(part[:-1] for part in room)
