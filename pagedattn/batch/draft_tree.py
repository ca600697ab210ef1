"""Drafts that branch: who descends from whom among the new tokens of each sequence."""

from dataclasses import dataclass
from typing import Any, Generic

import jax
from jaxtyping import Int, Integer

from .._arrays.namespace import arange, as_dtype, cdiv, namespace
from .._arrays.typing import ArrayT
from ..masks import WORD
from .indices import sequence_ids, token_positions


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DraftTree(Generic[ArrayT]):
    """The lines of descent of a batch's new tokens, made once a step; int32 arrays.

    Fields:
      parents: the index, among its sequence's new tokens, of the token before each, -1 for none.
      depths: how many of its sequence's new tokens come before a token in its own line.
      ancestors: bit `j % 32` of word `j // 32` is set where the token is new token j of its
        sequence, or descends from it. No bit is set for padding.

    >>> import numpy as np
    >>> tree = draft_tree(np.array([-1, 0, 0, 2]), np.array([0, 4]), 4)  # two children of one root
    >>> tree.depths.tolist(), [f"{line:04b}" for [line] in tree.ancestors.tolist()]
    ([0, 1, 1, 2], ['0001', '0011', '0101', '1101'])
    """

    parents: Integer[ArrayT, "num_tokens"]
    depths: Integer[ArrayT, "num_tokens"]
    ancestors: Integer[ArrayT, "num_tokens words"]


def draft_tree(
    parents: Integer[Any, "num_tokens"],
    query_start_loc: Integer[Any, "num_seqs_plus_1"],
    max_query_len: int,
) -> DraftTree[Any]:
    """The tree of parents, by pointer doubling: in as many steps as `max_query_len` has bits.

    Takes int32 arrays of any framework. A parent that does not come before its token is none.
    """
    xp, num_tokens = namespace(parents), parents.shape[0]
    own = own_indices(query_start_loc, num_tokens)
    rooted = (parents >= 0) & (parents < own)
    before = xp.where(rooted, arange(num_tokens, parents) - own + parents, -1)
    depths, one = as_dtype(rooted, xp.int32), as_dtype(own[:, None] >= 0, xp.int32)
    words = arange(num_words(max_query_len), parents)
    ancestors = xp.where(words == own[:, None] // WORD, one << own[:, None] % WORD, 0)
    for _ in range((max_query_len - 1).bit_length()):
        found, at = before >= 0, xp.clip(before, 0, None)
        depths = depths + xp.where(found, depths[at], 0)
        ancestors = ancestors | xp.where(found[:, None], ancestors[at], 0)
        before = xp.where(found, before[at], -1)
    return DraftTree(xp.where(rooted, parents, -1), depths, ancestors)


def num_words(max_query_len: int) -> int:
    """Words of `DraftTree.ancestors`."""
    return cdiv(max(1, max_query_len), WORD)


def own_indices(
    query_start_loc: Integer[Any, "num_seqs_plus_1"], num_tokens: int
) -> Int[Any, "{num_tokens}"]:
    """The index of each token among its sequence's new ones, -1 for padding tokens.

    >>> import numpy as np
    >>> own_indices(np.array([0, 1, 3]), 4).tolist()
    [0, 0, 1, -1]
    """
    ids, tokens = sequence_ids(query_start_loc, num_tokens), arange(num_tokens, query_start_loc)
    return namespace(ids).where(ids >= 0, as_dtype(tokens - query_start_loc[ids], ids.dtype), -1)


def tree_positions(
    query_start_loc: Integer[Any, "num_seqs_plus_1"],
    seq_lens: Integer[Any, "num_seqs"],
    tree: DraftTree[Any],
) -> Integer[Any, "num_tokens"]:
    """The position `context_len + depth` of each token, 0 for padding tokens."""
    num_tokens = tree.depths.shape[0]
    own = own_indices(query_start_loc, num_tokens)
    in_order = token_positions(query_start_loc, seq_lens, num_tokens)
    return namespace(own).where(own >= 0, in_order - own + tree.depths, 0)


def key_positions(
    depths: Integer[Any, "num_tokens"],
    starts: Integer[Any, "*#n"],
    context_lens: Integer[Any, "*#n"],
    keys: Integer[Any, "*#n k"],
) -> tuple[Integer[Any, "*#n k"], Integer[Any, "*#n k"]]:
    """The positions of keys, and their indices among the new tokens, negative in the context.

    Args:
      starts, context_lens: of the sequences: the first of their new tokens, and their context.
      keys: where the keys lie, counted in slots from their sequence's first one.
    """
    xp = namespace(depths)
    own, tokens = keys - context_lens[..., None], keys - (context_lens - starts)[..., None]
    depth = depths[xp.clip(tokens, 0, depths.shape[0] - 1)]
    return xp.where(own >= 0, context_lens[..., None] + depth, keys), own
