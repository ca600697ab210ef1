"""Starts that are padded with zeros behind the last sequence, as batches may have them."""

import dataclasses

import numpy as np
import pytest
import torch
from torch_layers import assert_same

from pagedattn import make_batch
from pagedattn_torch import AttentionMetadata, TorchSDPABackendImpl

PADDED = torch.tensor([0, 3, 4, 0, 0])


@pytest.fixture
def batch(on_cpu):
    """Beside the tensors of these tests, which lie on the CPU."""
    return make_batch([3, 1], [0, 4], [[1], [0, 2]], block_size=4, pad_seqs=4)


def of_batch(batch, starts):
    return AttentionMetadata.from_batch(dataclasses.replace(batch, query_start_loc=starts))


def of_fields(batch, starts):
    return AttentionMetadata(
        num_prefills=1,
        num_prefill_tokens=3,
        num_decode_tokens=1,
        slot_mapping=batch.slot_mapping,
        seq_lens_tensor=batch.seq_lens,
        block_tables=batch.block_tables,
        query_start_loc=starts,
    )


@pytest.mark.parametrize("make", [of_batch, of_fields])
def test_zeros_behind_the_last_sequence_are_padding(batch, make):
    metas = make(batch, PADDED), make(batch, batch.query_start_loc)
    padded, plain = (
        {name: value for name, value in vars(meta)["_fields"].items() if value is not None}
        for meta in metas
    )
    assert padded.keys() == plain.keys()
    for name, value in padded.items():
        np.testing.assert_array_equal(value, plain[name], name)
    layer, rows = TorchSDPABackendImpl(num_heads=2, head_size=8), torch.arange(64.0).view(4, 16)
    caches = torch.ones(2, 2, 3, 4, 2, 8)
    outs = [
        layer.forward(rows, rows, rows, cache, meta)
        for cache, meta in zip(caches, metas, strict=True)
    ]
    assert_same(*outs)
    assert_same(*caches)


def test_encoders_too():
    metas = [
        AttentionMetadata(
            num_prefills=2,
            num_prefill_tokens=2,
            num_decode_tokens=0,
            encoder_seq_lens=[2, 3, 0],
            encoder_query_start_loc=starts,
        )
        for starts in (torch.tensor([0, 2, 5, 0]), torch.tensor([0, 2, 5, 5]))
    ]
    assert_same(*(meta.encoder_query_start_loc for meta in metas))
