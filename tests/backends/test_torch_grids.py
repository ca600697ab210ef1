"""The grids that paged attention is tested with elsewhere, through the layers, at unit scale.

Sizes are thinned so that the file runs on two slow cores; tolerances are the field's own.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest
import torch
from torch_layers import (
    assert_close,
    dense,
    layer_of,
    new_layer,
    normal,
    reference,
    spec_of,
    step_of,
    tensor,
)

from pagedattn import AttentionSpec, alibi_slopes
from pagedattn.testing import random_problem
from pagedattn_torch import AttentionMetadata, TorchSDPABackend

pytestmark = pytest.mark.usefixtures("layers")
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
# what is left of float32 after sums in another order, and of halves after their rounding
CLOSE = {
    "float32": {"atol": 1e-5, "rtol": 1e-5},
    "float16": {"atol": 2e-3, "rtol": 2e-3},
    "bfloat16": {"atol": 1.5e-2, "rtol": 1.6e-2},
}


def problem_of(lens, spec, dtype, **sizes):
    queries, keys = zip(*lens, strict=True)
    return random_problem(queries, keys, spec, dtype=DTYPES[dtype], **sizes)


def check(problem, dtype):
    assert_close(layer_of(problem).forward(*step_of(problem)), reference(problem), **CLOSE[dtype])


DECODES = [
    # heads, head size, block size, ALiBi, dtype
    ((40, 40), 64, 16, False, "float16"),
    ((64, 8), 128, 32, True, "float16"),
    ((64, 8), 80, 16, True, "bfloat16"),
    ((40, 40), 256, 32, False, "bfloat16"),
    ((64, 8), 96, 16, False, "bfloat16"),
    ((40, 40), 112, 16, True, "float16"),
    ((64, 8), 120, 32, True, "float32"),
    ((40, 40), 192, 16, False, "float32"),
]


@pytest.mark.parametrize(("heads", "head_size", "block_size", "alibi", "dtype"), DECODES)
def test_decode(heads, head_size, block_size, alibi, dtype):
    """Seven sequences, tables with repeats, values of 1 / sqrt(head_size), slopes of any sign."""
    rng = np.random.default_rng(0)
    lens = [*rng.integers(1, 200, 6).tolist(), 200]
    slopes = tuple(rng.standard_normal(heads[0]).tolist()) if alibi else None
    tables = rng.integers(0, 61, (7, -(-200 // block_size)))
    problem = problem_of(
        [(1, n) for n in lens],
        AttentionSpec(alibi_slopes=slopes),
        dtype,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_size,
        block_size=block_size,
        num_blocks=61,
        block_tables=np.sort(tables, axis=1),
    )
    small = np.asarray(head_size**-0.5, problem.query.dtype)
    arrays = problem.query, problem.key_cache, problem.value_cache
    arrays = dict(
        zip(("query", "key_cache", "value_cache"), (x * small for x in arrays), strict=True)
    )
    problem = problem.replace(**arrays)
    # Blocks are shared at random, so the keys are all in the cache already.
    cache = torch.stack([tensor(problem.key_cache), tensor(problem.value_cache)])
    meta = AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=7,
        seq_lens=lens,
        block_tables=torch.from_numpy(problem.block_tables),
    )
    out = layer_of(problem).forward(tensor(problem.query), None, None, cache, meta)
    assert_close(out, reference(problem), atol=1e-3, rtol=1e-5)


PREFIXES = [
    # queries a KV head, head size, window, ALiBi
    (1, 128, None, False),
    (8, 96, 16, True),
    (64, 24, 64, False),
    (8, 128, None, True),
    (1, 24, 2048, False),
    (64, 96, 32, True),
]


@pytest.mark.parametrize(("group", "head_size", "window", "alibi"), PREFIXES)
def test_prefix_prefill(group, head_size, window, alibi):
    """Ten chunks on cached prefixes in blocks of 32, one of them a decode."""
    rng = np.random.default_rng(1)
    queries = [*rng.integers(1, 48, 9).tolist(), 1]
    lens = [(q, q + int(c)) for q, c in zip(queries, rng.integers(1, 64, 10), strict=True)]
    spec = AttentionSpec(sliding_window=window, alibi_slopes=alibi_slopes(64) if alibi else None)
    sizes = {"num_heads": 64, "num_kv_heads": 64 // group, "head_dim": head_size}
    check(problem_of(lens, spec, "float16", block_size=32, **sizes), "float16")


RAGGED = {
    "decode": [(1, 213), (1, 1), (1, 312), (1, 7), (1, 7812)],
    "prefill": [(2345, 2345), (5, 5), (3, 16), (134, 5131)],
    "mixed": [(992, 2456), (1, 1234), (98, 1145), (1, 4162), (2345, 2345)],
}
RAGGED_SIZES = [
    # list, heads, head size, block size, dtype, spec
    ("decode", (4, 4), 96, 96, "bfloat16", {"sliding_window": 256}),
    ("decode", (8, 2), 512, 128, "float16", {}),
    ("decode", (9, 3), 128, 48, "float32", {}),
    ("prefill", (4, 4), 96, 128, "bfloat16", {}),
    ("mixed", (4, 4), 96, 128, "bfloat16", {"sliding_window": 256}),
    ("mixed", (9, 3), 80, 96, "float32", {"sliding_window": 256}),
    ("decode", (8, 2), 96, 128, "bfloat16", {"logits_soft_cap": 50.0}),
    ("decode", (8, 2), 96, 128, "bfloat16", {"alibi_slopes": alibi_slopes(8)}),
]


@pytest.mark.parametrize(
    ("name", "heads", "head_size", "block_size", "dtype", "fields"), RAGGED_SIZES
)
def test_ragged(name, heads, head_size, block_size, dtype, fields):
    sizes = {"num_heads": heads[0], "num_kv_heads": heads[1]}
    sizes |= {"head_dim": head_size, "block_size": block_size}
    problem = problem_of(RAGGED[name], AttentionSpec(**fields), dtype, **sizes)
    out = layer_of(problem).forward(*step_of(problem))
    assert_close(out, reference(problem), atol=1.5e-2, rtol=1e-2)


@pytest.mark.parametrize("window", [None, 256])
def test_ragged_encoders(window):
    """Windows of encoders are symmetric."""
    lens = [1, 678, 1367, 145, 36]
    layer = new_layer(4, 96, num_kv_heads=2, sliding_window=window)
    query, key, value = (
        normal(i, sum(lens), h, 96, dtype=torch.bfloat16) for i, h in enumerate((4, 2, 2))
    )
    meta = AttentionMetadata(
        num_prefills=5, num_prefill_tokens=sum(lens), num_decode_tokens=0, seq_lens=lens
    )
    out = layer.forward(query, key, value, None, meta, attn_type="encoder_only")
    want = dense(query, key, value, lens, lens, spec_of(layer, "encoder_only"))
    assert_close(out, want, atol=1.5e-2, rtol=1e-2)


def downward(lens, block_size, first):
    """Block tables that count down from a block, with ten columns of zeros behind."""
    ids, rows = itertools.count(first, -1), []
    for n in lens:
        rows.append([next(ids) for _ in range(-(-n // block_size))])
    width = max(map(len, rows)) + 10
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)


def slots_of(tables, spans, block_size):
    """int64 slots of the positions in each sequence's span."""
    slots = []
    for row, span in zip(tables, spans, strict=True):
        at = torch.arange(*span)
        slots.append(row[at // block_size].long() * block_size + at % block_size)
    return torch.cat(slots)


@pytest.mark.parametrize(
    ("num_heads", "head_size", "count"),
    [(1, 64, 1), (1, 64, 16), (16, 64, 16), (1, 256, 16), (16, 256, 1)],
)
def test_encoder_decoder(num_heads, head_size, count):
    """Encoder, decoder prefill, cross prefill, then a decode of each, on one cache; float32."""
    rng = np.random.default_rng(count)
    lens, encoder_lens = (rng.integers(2, 128, count).tolist() for _ in range(2))
    tables, cross_tables = downward(lens, 16, 256), downward(encoder_lens, 16, 128)
    encoder = {"encoder_seq_lens": encoder_lens, "cross_block_tables": cross_tables}
    prefill = TorchSDPABackend.make_metadata(
        num_prefills=count,
        num_prefill_tokens=sum(lens) - count,
        num_decode_tokens=0,
        slot_mapping=slots_of(tables, [(0, n - 1) for n in lens], 16),
        seq_lens=[n - 1 for n in lens],
        block_tables=tables,
        cross_slot_mapping=slots_of(cross_tables, [(0, n) for n in encoder_lens], 16),
        is_prompt=True,
        **encoder,
    )
    decode = TorchSDPABackend.make_metadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=count,
        slot_mapping=slots_of(tables, [(n - 1, n) for n in lens], 16),
        seq_lens=lens,
        block_tables=tables,
        cross_slot_mapping=torch.zeros(0, dtype=torch.int64),
        is_prompt=False,
        **encoder,
    )
    layer = new_layer(num_heads, head_size, head_size**-0.5)
    kv_cache = torch.full(
        TorchSDPABackend.get_kv_cache_shape(601, 16, num_heads, head_size), torch.nan
    )
    rows = iter(range(99))

    def qkv(tokens):
        return (normal(next(rows), tokens, num_heads, head_size) for _ in range(3))

    def close(kind, got, query, key, value, query_lens, key_lens):
        want = dense(query, key, value, query_lens, key_lens, spec_of(layer, kind))
        assert_close(got, want, **CLOSE["float32"])

    own = list(qkv(sum(encoder_lens)))
    out = layer.forward(*own, kv_cache, prefill, attn_type="encoder")
    close("encoder", out, *own, encoder_lens, encoder_lens)
    assert torch.isnan(kv_cache).all()

    every = list(qkv(sum(lens)))
    last = torch.tensor(lens).cumsum(0) - 1
    first = torch.ones(sum(lens), dtype=torch.bool).index_fill(0, last, False)
    before = [n - 1 for n in lens]
    chunk = [x[first] for x in every]
    out = layer.forward(*chunk, kv_cache, prefill, attn_type="decoder")
    close("decoder", out, *chunk, before, before)

    query, key, value = every[0], *list(qkv(sum(encoder_lens)))[1:]
    out = layer.forward(query[first], key, value, kv_cache, prefill, attn_type="encoder_decoder")
    close("encoder_decoder", out, query[first], key, value, before, encoder_lens)

    out = layer.forward(*(x[last] for x in every), kv_cache, decode, attn_type="decoder")
    close("decoder", out, every[0][last], *every[1:], [1] * count, lens)
    out = layer.forward(query[last], None, None, kv_cache, decode, attn_type="encoder_decoder")
    close("encoder_decoder", out, query[last], key, value, [1] * count, encoder_lens)
