"""Plans a layer's call: which keys it attends to, and where it writes the new ones before.

New keys can be read from two places: from the arguments, and from the cache after the write.
Prompts without a context read the arguments, because with a sliding window some of their tokens may
have no slots, and their rows of the block tables may hold anything. Sequences with a context read
the context and the new keys from the cache.

A step may hold both kinds, and only the GPU may know which sequence is which. So there is one part
for each kind, over all tokens. In it the sequences of the other kind see no key, and get rows of 0:
the sum of both parts is the result.

Where new tokens of sequences with a context may be unwritten, all prefills are one part, of the
keys that are given and copies of the contexts: see `unwritten`.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn import BatchMetadata, InvalidInputError, KVCache
from pagedattn._arrays.inspect import known
from pagedattn.batch.packed import packed_cache
from pagedattn.cache import validate_writes

from ..arrays import tensor
from ..cache import DeviceRows, HostRows, slot_index
from .attention_type import AttentionType
from .inputs import Fresh
from .metadata import batches
from .quantised import like_cache
from .slots import check_contexts, check_slots, completed
from .unwritten import Contexts, reach, with_contexts


class Part(NamedTuple):
    """A batch of the first tokens of a call over one source of keys.

    These are the first `num_fresh` of the keys given, after `contexts` copied from the cache; or,
    with None, the keys in the cache.
    """

    batch: BatchMetadata
    num_fresh: int | None = None
    contexts: Contexts | None = None
    bias: Tensor | None = None

    def with_bias(self, bias: Tensor | None) -> "Part":
        """The part with its rows of the bias of all tokens."""
        return self if bias is None else self._replace(bias=bias[: self.batch.num_tokens])

    @property
    def options(self) -> dict[str, Any]:
        """The options of `paged_attention` for this part that are arrays."""
        return {} if self.bias is None else {"bias": self.bias}

    def arrays(self, query: Tensor, fresh: Fresh | None, cache: Any) -> tuple[Tensor, KVCache]:
        """The queries and keys of this part."""
        if self.num_fresh is not None and fresh is not None:
            own = like_cache(packed_cache(*fresh.first(self.num_fresh)), cache)
            cache = own if self.contexts is None else self.contexts.before(own, cache)
        count = self.batch.num_tokens
        return query if count == query.shape[0] else query[:count], cache


class Plan(NamedTuple):
    """The parts of a call, whose sum is its result, and where its new keys are written first.

    `rows` is None if nothing is written.
    """

    parts: list[Part]
    rows: HostRows | DeviceRows | None


def plan(
    fresh: Fresh | None, cache: KVCache | None, meta, kind: AttentionType, window: int | None
) -> Plan:
    """The plan of a call of a type of attention.

    Args:
      fresh: the new keys and values; None if the cache holds them already.
      cache: None if the call reads and writes none.
      window: how many keys a token sees; None is all.
    """
    if cache is None:
        return Plan([_packed(fresh, meta, kind)], None)
    tables = meta.block_tables if kind is AttentionType.DECODER else meta.cross_block_tables
    if fresh is None:
        parts = [Part(meta.to_batch(cache.block_size, kind))]
    elif tables is None or tables.numel() == 0:
        parts = [_packed(fresh, meta, kind)]
    elif kind is AttentionType.DECODER:
        parts = _decoder(fresh, cache, meta, window)
    else:
        parts = [Part(meta.to_batch(cache.block_size, kind))]
    return Plan(parts, None if fresh is None else _rows(cache, fresh, meta, kind))


def _rows(cache, fresh, meta, kind) -> HostRows | DeviceRows:
    name = "slot_mapping" if kind is AttentionType.DECODER else "cross_slot_mapping"
    slots = getattr(meta, name)
    if slots is None:
        raise InvalidInputError(f"{kind} attention needs {name} to write keys to the cache")
    slots = tensor(name, slots, cache.key.device)
    validate_writes.write(cache, fresh.key, fresh.value, slots)
    return slot_index(slots, cache.num_slots, cache.block_size)


def _packed(fresh, meta, kind) -> Part:
    if fresh is None:
        raise InvalidInputError(
            f"{kind} attention needs key and value where it has no cache with block tables"
        )
    return Part(batches.packed(meta, kind), len(fresh.key))


def _decoder(fresh, cache, meta, window) -> list[Part]:
    some_fresh, some_cached = _kinds(meta)
    if not some_cached:
        return [_packed(fresh, meta, AttentionType.DECODER)]
    batch = meta.to_batch(cache.block_size)
    check_contexts(batch)
    batch = completed(batch, meta.max_prefill_seq_len) if meta.num_prefills else batch
    check_slots(batch)
    count = meta.num_prefills
    if (seen := reach(batch, count, window)) is not None:
        return _prefills_apart(cache, meta, batch, seen)
    if not some_fresh:
        return [Part(batch)]
    prompts = batches.prefills(meta)
    alone = prompts.seq_lens == meta.seq_lens_tensor[:count]
    others = ~torch.nn.functional.pad(alone, (0, batch.num_seqs - count))
    return [Part(_where(others, batch)), Part(_where(alone, prompts), meta.num_prefill_tokens)]


def _prefills_apart(cache, meta, batch, seen) -> list[Part]:
    count, tokens = meta.num_prefills, meta.num_prefill_tokens
    own, contexts = with_contexts(batch, count, tokens, seen, cache.num_blocks)
    decodes = torch.arange(batch.num_seqs, device=batch.seq_lens.device) >= count
    return [Part(_where(decodes, batch)), Part(own, tokens, contexts)]


def _where(chosen: Tensor, batch: BatchMetadata) -> BatchMetadata:
    """The batch, with keys for the chosen sequences only."""
    return dataclasses.replace(batch, seq_lens=torch.where(chosen, batch.seq_lens, 0))


def _kinds(meta) -> tuple[bool, bool]:
    """(Whether there may be prompts without a context, whether there may be other sequences)."""
    prompts, listed = meta.num_prefills, meta.seq_lens
    if not prompts:
        return False, True
    if listed is not None and sum(listed[:prompts]) == meta.num_prefill_tokens:
        return True, sum(listed[prompts:]) > 0
    contexts = known(meta.context_lens_tensor[:prompts])
    return contexts is None or not contexts.all(), True
