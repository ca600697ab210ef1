"""How sdpa groups sequences whose lengths only the device checks: none leads out of bounds."""

import hypothesis.strategies as st
import torch
from hypothesis import given

from pagedattn import AttentionSpec, BatchMetadata, KVCache
from pagedattn._arrays.namespace import cdiv
from pagedattn._dispatch.call import call_of
from pagedattn_torch.backends.sdpa.grouping import make_buckets

NUM_SEQS, MAX_BLOCKS, BLOCK_SIZE, MAX_QUERY_LEN = 3, 4, 4, 8
WILD = (-(2**31), -(2**30), -17, -1, MAX_BLOCKS * BLOCK_SIZE + 1, 97, 10**6, 2**31 - 1)


def lengths(most, count):
    one = st.one_of(st.integers(0, most), st.sampled_from(WILD))
    return st.lists(one, min_size=count, max_size=count)


@given(
    seq_lens=lengths(MAX_BLOCKS * BLOCK_SIZE, NUM_SEQS),
    starts=lengths(12, NUM_SEQS + 1),
    num_tokens=st.sampled_from([5, 12]),
    window=st.sampled_from([None, 1, 5]),
    causal=st.booleans(),
)
def test_lengths_of_any_value_stay_inside_the_table_and_the_tokens(
    seq_lens, starts, num_tokens, window, causal
):
    batch = BatchMetadata(
        block_tables=torch.zeros((NUM_SEQS, MAX_BLOCKS), dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int32),
        positions=torch.zeros(num_tokens, dtype=torch.int32),
        block_size=BLOCK_SIZE,
        max_query_len=MAX_QUERY_LEN,
    )
    spec = AttentionSpec(sliding_window=window, causal=causal)
    plane = torch.zeros(9, BLOCK_SIZE, 1, 8)
    call = call_of(torch.zeros(num_tokens, 2, 8), KVCache(plane, plane), batch, spec)
    for bucket in make_buckets(call, batch, 64):
        rows = bucket.rows
        columns = rows.first_blocks + cdiv(rows.num_keys, BLOCK_SIZE)
        assert ((rows.first_blocks >= 0) & (columns <= MAX_BLOCKS)).all(), rows
        most = min(MAX_QUERY_LEN, num_tokens)
        assert ((rows.query_lens >= 0) & (rows.query_lens <= most)).all(), rows
        assert (rows.num_keys > 0).all(), rows
