"""What the ipex backend copies, and that lengths and ids of garbage lead nowhere."""

import itertools
import resource

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("intel_extension_for_pytorch")

from hypothesis import example, given
from hypothesis import strategies as st
from ipex_raw import isolated

from pagedattn import AttentionSpec, BatchMetadata, KVCache, make_batch
from pagedattn._dispatch.call import call_of
from pagedattn_torch import empty_kv_cache, paged_attention
from pagedattn_torch.arrays import batch_on
from pagedattn_torch.backends import ipex

MB = 1 << 20
ORDERS = [(0, 1, 2, 3, 4), (0, 1, 3, 2, 4), (0, 1, 3, 4, 2)]


def run(query, cache, batch, spec):
    """The backend, without the checks that come before it."""
    return ipex.run(call_of(query, cache, batch, spec), query, cache, batch)


def growths(order):
    """Bytes that calls on three blocks of a cache of 1 GB add to the process, at most."""
    calls = list(itertools.product((16, 24), (1, 30), (None, 5)))
    for call in calls:
        growth(order, 100, *call)  # threads need memory too
    return [growth(order, MB // 2, *call) for call in calls]


def growth(order, num_slots, block_size, query_len, window):
    num_blocks = num_slots // block_size
    held = empty_kv_cache((2, num_blocks, block_size, 4, 64), order, dtype=torch.float32)
    cache, table = KVCache(held[0], held[1]), [num_blocks - 1, 0, num_blocks // 2]
    held[:, table] = 1.0
    batch = make_batch([query_len], [40 - query_len], [table], block_size=block_size)
    query, spec = torch.ones(query_len, 8, 64), AttentionSpec(sliding_window=window)
    before = peak()
    out = paged_attention(query, cache, batch, spec, backend="ipex")
    grown = peak() - before
    assert (out - 1).abs().max() < 1e-5
    return grown


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def copied_whole():
    """What the same cache takes once every page of it is touched."""
    before = peak()
    torch.ones(1000 * MB // 4)
    return peak() - before


@pytest.mark.parametrize("order", ORDERS)
def test_no_call_copies_the_cache(order):
    grown = isolated(growths, order)
    assert grown is not None
    assert max(grown) < 30 * MB


def test_a_copy_would_show():
    grown = isolated(copied_whole)
    assert grown is not None
    assert grown > 900 * MB


def far_apart(query_len, window):
    """How far off a call is on blocks of a cache that int32 cannot count the elements of."""
    held, table = torch.empty(2, 140_000, 16, 8, 128, dtype=torch.float16), [139_999, 139_990, 7]
    generator = torch.Generator().manual_seed(0)
    near = torch.randn(2, 3, 16, 8, 128, generator=generator).half()
    held[:, table] = near
    query, spec = near[0, 0, :query_len], AttentionSpec(sliding_window=window)
    outs = []
    for planes, ids, backend in ((held, table, "ipex"), (near, [0, 1, 2], "sdpa")):
        batch = make_batch([query_len], [40 - query_len], [ids], block_size=16)
        outs.append(paged_attention(query, KVCache(*planes), batch, spec, backend=backend))
    return (outs[0] - outs[1]).abs().max().item()


@pytest.mark.parametrize("query_len", [1, 9])
@pytest.mark.parametrize("window", [None, 5])
def test_more_elements_than_int32_counts(query_len, window):
    assert isolated(far_apart, query_len, window) < 2e-3


INT32 = st.one_of(
    st.integers(-3, 14), st.integers(-(2**31), 2**31 - 1), st.sampled_from([2**31 - 1, -(2**31)])
)
SPECS = [
    AttentionSpec(),
    AttentionSpec(sliding_window=3),
    AttentionSpec(causal=False, sliding_window=3),
    AttentionSpec(logits_soft_cap=2.0, sliding_window=6),
]


def guarded(seed, *shape):
    """Values between -1 and 1 with a huge number before and behind them in memory."""
    inner = np.random.default_rng(seed).uniform(-1, 1, shape)
    outer = torch.full((shape[0] + 2 * 9, *shape[1:]), 1e30)
    outer[9:-9] = torch.tensor(inner)
    return outer[9:-9]


def garbage_batch(tables, seq_lens, starts, longest):
    fields = {"block_tables": tables, "seq_lens": seq_lens, "query_start_loc": starts}
    fields |= {"slot_mapping": [-1] * 7, "positions": [0] * 7}
    arrays = {name: torch.tensor(values, dtype=torch.int32) for name, values in fields.items()}
    return batch_on(BatchMetadata(**arrays, block_size=4, max_query_len=longest), None)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("longest", [1, 7])
@given(
    tables=st.lists(st.lists(INT32, min_size=3, max_size=3), min_size=3, max_size=3),
    seq_lens=st.lists(INT32, min_size=3, max_size=3),
    starts=st.lists(INT32, min_size=4, max_size=4),
)
@example(tables=[[9**9] * 3] * 3, seq_lens=[2**31 - 1] * 3, starts=[0, 3, 5, 7])
@example(tables=[[-1] * 3] * 3, seq_lens=[12, -5, 2**30], starts=[0, 1, 2, 3])
@example(tables=[[0] * 3] * 3, seq_lens=[12] * 3, starts=[0, 2**31 - 1, -(2**31), 2**31 - 1])
@example(tables=[[0] * 3] * 3, seq_lens=[0] * 3, starts=[0, 1, 2, 3])
def test_garbage_leads_nowhere(spec, longest, tables, seq_lens, starts):
    """Values from inside the cache cannot average to more than 1."""
    cache = KVCache(guarded(1, 5, 4, 2, 16), guarded(2, 5, 4, 2, 16))
    batch = garbage_batch(tables, seq_lens, starts, longest)
    out, lse = run(guarded(3, 7, 4, 16), cache, batch, spec)
    assert out.shape == (7, 4, 16)
    assert lse is None
    assert not (out.abs() > 1.001).any()


@pytest.mark.parametrize("spec", SPECS)
def test_garbage_of_one_sequence_spares_the_others(spec):
    batch = make_batch([1, 2, 1], [8, 3, 4], [[0, 1, 2], [3, 4], [1, 0]], block_size=4)
    good = batch_on(batch, None)
    cache = KVCache(guarded(1, 5, 4, 2, 16), guarded(2, 5, 4, 2, 16))
    query = guarded(3, 4, 4, 16)
    want = run(query, cache, good, spec)[0]
    for lens, ids in (([9, 2**31 - 1, 5], 3), ([9, -7, 5], 4), ([9, 5, 5], 2**30)):
        tables = good.block_tables.clone()
        tables[1, 0] = ids
        bad = jax.tree.map(lambda leaf: leaf, good)
        bad = type(bad)(
            **{**vars(bad), "block_tables": tables, "seq_lens": torch.tensor(lens).int()}
        )
        out = run(query, cache, bad, spec)[0]
        torch.testing.assert_close(out[[0, 3]], want[[0, 3]])
