"""What a type checker knows of results and records: never run, `make lint` checks it strictly."""

from typing import assert_type

import jax
import torch

import pagedattn
from pagedattn import AttentionSpec, KVCache, init_kv_cache, make_batch
from pagedattn import paged_attention as attend
from pagedattn_torch import paged_attention as attend_torch


def results(query: jax.Array, tensor: torch.Tensor, flag: bool) -> None:
    cache, batch = init_kv_cache(2, 4, 1, 8), make_batch([1], [0], [[0]], block_size=4)
    assert_type(attend(query, cache, batch), jax.Array)
    assert_type(attend(query, cache, batch, return_lse=True), tuple[jax.Array, jax.Array])
    either = attend(query, cache, batch, return_lse=flag)
    assert_type(either, jax.Array | tuple[jax.Array, jax.Array])
    starts, ragged = batch.query_start_loc, pagedattn.ragged_attention
    packed = ragged(query, query, query, starts, starts, max_query_len=1, max_key_len=1)
    assert_type(packed, jax.Array)
    pages = KVCache(tensor, tensor)
    assert_type(attend_torch(tensor, pages, batch), torch.Tensor)
    assert_type(
        attend_torch(tensor, pages, batch, return_lse=True), tuple[torch.Tensor, torch.Tensor]
    )


def records(query: jax.Array, tensor: torch.Tensor) -> None:
    cache, batch = init_kv_cache(2, 4, 1, 8), make_batch([1], [0], [[0]], block_size=4)
    pages, latents = KVCache(tensor, tensor), pagedattn.init_latent_cache(2, 4, 8, 6)
    assert_type(cache.key, jax.Array)
    assert_type(pages.value, torch.Tensor | None)
    assert_type(pages.planes, tuple[torch.Tensor, ...])
    assert_type(pagedattn.write_kv(latents, query, None, batch.slot_mapping).key, jax.Array)
    assert_type(attend(query, latents, batch), jax.Array)
    assert_type(batch.seq_lens, jax.Array)
    assert_type(AttentionSpec().scale, float | None)
