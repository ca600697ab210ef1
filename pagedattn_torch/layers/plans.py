"""What a layer's call attends to, and what it writes before.

A new key is at hand twice: as it is given, and in the cache, once it is written. A prompt without a
context attends to the keys given, as they are: behind a window its tokens may have no slots, and
its row of the block tables may hold anything. Whoever has a context reads that and the new keys in
the cache. A step may hold both kinds, and which sequence is which may be known to the GPU alone; so
each kind is a part over all tokens, in which the sequences of the other kind see no key. Such rows
are 0, and the sum of the parts is the result.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pagedattn import BatchMetadata, InvalidInputError, KVCache
from pagedattn.checks import known, require
from pagedattn.packed import packed_cache

from ..arrays import tensor
from ..cache import write_kv_
from .attention_type import AttentionType
from .inputs import Fresh
from .metadata import batches
from .slots import check_contexts, check_slots, completed


class Part(NamedTuple):
    """Keys, and the first tokens of the call as a batch over them."""

    keys: KVCache
    batch: BatchMetadata


class Plan(NamedTuple):
    """The parts whose results, added, are the call's; and the write that comes before."""

    parts: list[Part]
    write: Callable[[], Any]


def plan(fresh: Fresh | None, cache: KVCache | None, meta, kind: AttentionType) -> Plan:
    """What a call of some kind attends to, and writes before.

    Args:
      fresh: the keys given; None if the cache holds them already.
      cache: None if the call is to read and write none.
    """
    if cache is None:
        return Plan([_packed(fresh, meta, kind)], lambda: None)
    write = _write(cache, fresh, meta, kind)
    tables = meta.block_tables if kind is AttentionType.DECODER else meta.cross_block_tables
    if fresh is None:
        parts = [Part(cache, meta.to_batch(cache.block_size, kind))]
    elif tables is None or tables.numel() == 0:
        parts = [_packed(fresh, meta, kind)]
    elif kind is AttentionType.DECODER:
        parts = _decoder(fresh, cache, meta)
    else:
        parts = [Part(cache, meta.to_batch(cache.block_size, kind))]
    return Plan(parts, write)


def _write(cache, fresh, meta, kind) -> Callable[[], Any]:
    if fresh is None:
        return lambda: None
    name = "slot_mapping" if kind is AttentionType.DECODER else "cross_slot_mapping"
    slots = getattr(meta, name)
    require(slots is not None, f"{kind} attention needs {name} to write keys to the cache")
    slots = tensor(name, slots, cache.key.device)
    return functools.partial(write_kv_, cache, *fresh, slots)


def _packed(fresh, meta, kind) -> Part:
    if fresh is None:
        raise InvalidInputError(
            f"{kind} attention needs key and value where it has no cache with block tables"
        )
    return Part(packed_cache(*fresh), batches.packed(meta, kind))


def _decoder(fresh, cache, meta) -> list[Part]:
    some_fresh, some_cached = _kinds(meta)
    if not some_cached:
        return [_packed(fresh, meta, AttentionType.DECODER)]
    batch = meta.to_batch(cache.block_size)
    check_contexts(batch)
    batch = completed(batch, meta.max_prefill_seq_len) if meta.num_prefills else batch
    check_slots(batch)
    if not some_fresh:
        return [Part(cache, batch)]
    prompts, keys = batches.prefills(meta), packed_cache(*fresh.first(meta.num_prefill_tokens))
    alone = prompts.seq_lens == meta.seq_lens_tensor[: meta.num_prefills]
    others = ~torch.nn.functional.pad(alone, (0, batch.num_seqs - meta.num_prefills))
    return [Part(cache, _where(others, batch)), Part(keys, _where(alone, prompts))]


def _where(chosen: Tensor, batch: BatchMetadata) -> BatchMetadata:
    """The batch, in which only the sequences chosen see keys."""
    return dataclasses.replace(batch, seq_lens=torch.where(chosen, batch.seq_lens, 0))


def _kinds(meta) -> tuple[bool, bool]:
    """Whether there may be prompts without a context, and whether there may be anything else."""
    prompts, listed = meta.num_prefills, meta.seq_lens
    if not prompts:
        return False, True
    if listed is not None and sum(listed[:prompts]) == meta.num_prefill_tokens:
        return True, sum(listed[prompts:]) > 0
    contexts = known(meta.context_lens_tensor[:prompts])
    return contexts is None or not contexts.all(), True
