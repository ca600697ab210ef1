"""Prefix hits, misses, chunks and decodes in one call, with the tables and slots that engines give.

An engine's row of the block tables may lack the blocks of new tokens, or be nothing at all for a
prompt without a context; behind a window its tokens have no slots. All is held to the oracle, with
and without a look at values, which on a GPU nobody reads.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_torch_bias import lists_of
from torch_layers import (
    assert_close,
    assert_same,
    hide_values,
    layer_of,
    normal,
    reference,
    step_of,
)

from pagedattn import AttentionSpec, InvalidInputError
from pagedattn.testing import assert_attention_close, random_problem
from pagedattn.testing.strategies import seeds
from pagedattn_torch import (
    AttentionMetadata,
    TorchSDPABackendImpl,
    XFormersImpl,
    init_kv_cache,
    write_kv_,
)

pytestmark = pytest.mark.usefixtures("layers")
TIGHT = {"atol": 2e-5, "rtol": 2e-5}
BLOCK = 4
TABLES = [[3, 4, 5], [6, 7, 0]]
SPECS = {
    "plain": AttentionSpec(),
    "window": AttentionSpec(sliding_window=3),
    "alibi, window": AttentionSpec(sliding_window=6, alibi_slopes=(0.5, -0.25, 0.1, 1.0)),
}
LENGTHS = st.tuples(st.integers(1, 11), st.integers(0, 10))


@pytest.fixture(params=["read", "unread"])
def values(request, monkeypatch):
    if request.param == "unread":
        hide_values(monkeypatch)


def ints(values, like) -> torch.Tensor:
    return torch.tensor(values, device=like.device)


def tables_of(meta, problem, lacks: str, block_size=BLOCK) -> torch.Tensor:
    """Tables in which the blocks that hold new tokens alone are missing for prefills."""
    tables = meta.block_tables.clone()
    for seq in range(meta.num_prefills):
        context = problem.seq_lens[seq] - problem.query_lens[seq]
        first = -(-int(context) // block_size)
        tables[seq, first:] = {"zeros": 0, "minus one": -1, "another": 1}[lacks]
    return tables


def narrowed(tables, meta, problem):
    """As wide as the longest context, or the longest decode."""
    lens = np.asarray(problem.seq_lens).copy()
    lens[: meta.num_prefills] -= np.asarray(problem.query_lens)[: meta.num_prefills]
    return tables[:, : -(-int(lens.max()) // BLOCK)]


def metadata(meta, **fields):
    """As an engine makes it: lists on the host, and nothing derived."""
    names = ("seq_lens", "seq_lens_tensor", "query_start_loc")
    lists = {name: getattr(meta, name) for name in names}
    counts = ("num_prefills", "num_prefill_tokens", "num_decode_tokens", "slot_mapping")
    own = {name: getattr(meta, name) for name in counts}
    return type(meta)(**own | lists | {"block_tables": meta.block_tables} | fields)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("lacks", ["zeros", "minus one", "another"])
@given(
    prefills=st.lists(LENGTHS, min_size=1, max_size=3),
    decodes=st.lists(st.integers(0, 10), max_size=2),
    name=st.sampled_from(list(SPECS)),
    seed=seeds(),
    listed=st.booleans(),
)
def test_tables_may_lack_the_blocks_of_new_tokens(
    values, narrow, lacks, prefills, decodes, name, seed, listed
):
    queries = [q for q, _ in prefills] + [1] * len(decodes)
    contexts = [c for _, c in prefills] + decodes
    lens = [q + c for q, c in zip(queries, contexts, strict=True)]
    problem = random_problem(queries, lens, SPECS[name], block_size=BLOCK, seed=seed)
    tokens = sum(q for q, _ in prefills)
    step = step_of(problem, num_prefills=len(prefills), num_prefill_tokens=tokens)
    meta = step.attn_metadata
    tables = tables_of(meta, problem, lacks)
    tables = narrowed(tables, meta, problem) if narrow else tables
    fields = {"seq_lens": lens if listed else None, "seq_lens_tensor": ints(lens, like=tables)}
    meta = metadata(meta, block_tables=tables, **fields)
    out = layer_of(problem).forward(*step[:4], meta)
    assert_close(out, reference(problem), **TIGHT)


@pytest.mark.parametrize("window", [1, 3, 5])
@pytest.mark.parametrize("others", [(), (7,), (0, 9)])
def test_tokens_behind_a_window_need_no_slots(values, window, others):
    """Prompts whose slots begin `window` tokens before the end, alone and beside others."""
    queries, lens = [13, 6] + [1] * len(others), [13, 6] + [c + 1 for c in others]
    problem = random_problem(queries, lens, AttentionSpec(sliding_window=window), block_size=BLOCK)
    step = step_of(problem, num_prefills=2, num_prefill_tokens=19)
    slots = step.attn_metadata.slot_mapping.clone()
    slots[: 13 - window] = slots[13 : 19 - window] = -1
    meta = metadata(step.attn_metadata, slot_mapping=slots)
    before = step.kv_cache.clone().flatten(1, 2)
    out = layer_of(problem).forward(*step[:4], meta)
    assert_close(out, reference(problem), **TIGHT)
    live = slots >= 0
    at = slots[live].long()
    before[0, at], before[1, at] = step.key[live], step.value[live]
    assert_same(step.kv_cache.flatten(1, 2), before)


@pytest.mark.parametrize("slots", ["none", "elsewhere"])
def test_a_prompt_without_a_context_sees_its_own_keys_wherever_they_go(values, slots):
    problem = random_problem([5, 9], [5, 9], AttentionSpec(), block_size=BLOCK)
    step = step_of(problem)
    own = step.attn_metadata.slot_mapping
    given_ = torch.full_like(own, -1) if slots == "none" else own.flip(0)
    out = layer_of(problem).forward(*step[:4], metadata(step.attn_metadata, slot_mapping=given_))
    assert_close(out, reference(problem), **TIGHT)


@pytest.mark.usefixtures("on_cpu")
def test_a_begun_block_is_not_replaced():
    """The context in it would be read from elsewhere."""
    problem = random_problem([5], [11], AttentionSpec(), block_size=BLOCK)
    step = step_of(problem)
    before = step.kv_cache.clone()
    tables = step.attn_metadata.block_tables.clone()
    tables[0, 1] = tables[0, 0]
    with pytest.raises(InvalidInputError, match="token 0"):
        layer_of(problem).forward(*step[:4], metadata(step.attn_metadata, block_tables=tables))
    assert_same(step.kv_cache, before)


def test_decodes_alone_cost_no_more(values, monkeypatch):
    """What completes tables is not even called."""
    monkeypatch.setattr("pagedattn_torch.layers.plans.completed", None)
    problem = random_problem([1, 1], [9, 5], AttentionSpec(), block_size=BLOCK)
    out = layer_of(problem).forward(*step_of(problem))
    assert_close(out, reference(problem), **TIGHT)


def test_decodes_padded_for_a_captured_graph(values):
    """Padded are lengths, tables and slots, but not where tokens start; block 0 holds NaN."""
    problem = random_problem([1, 1], [9, 5], AttentionSpec(), num_blocks=9, block_tables=TABLES)
    query, key, value, kv_cache, meta = step_of(problem)
    padded = AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=4,
        slot_mapping=torch.cat([meta.slot_mapping, meta.slot_mapping.new_full((2,), -1)]),
        seq_lens=[9, 5, 1, 1],
        seq_lens_tensor=ints([9, 5, 1, 1], like=query),
        query_start_loc=ints([0, 1, 2], like=query),
        context_lens_tensor=ints([8, 4], like=query),
        block_tables=torch.cat([meta.block_tables, meta.block_tables.new_zeros(2, 3)]),
        use_cuda_graph=True,
    )
    rows = (torch.cat([x, x]) for x in (query, key, value))
    out = layer_of(problem).forward(*rows, kv_cache, padded)
    assert_close(out[:2], reference(problem), **TIGHT)
    assert not out[2:].any()


@pytest.mark.parametrize("kind", ["decoder", "encoder_decoder"])
def test_keys_that_nobody_has_are_missed(values, kind):
    """No tables, and keys that are not among those given: an error, not a result without them."""
    problem = random_problem([5, 1], [5, 9], AttentionSpec(), block_size=BLOCK)
    step = step_of(problem)
    before = step.kv_cache.clone()
    cross = {
        "encoder_seq_lens": [6, 4],
        "num_encoder_tokens": 6,
        "encoder_query_start_loc": ints([0, 6, 6], like=step.query),
        "cross_slot_mapping": ints(range(6), like=step.query),
        "cross_block_tables": ints([[], []], like=step.query).int(),
    }
    meta = AttentionMetadata(
        num_prefills=1,
        num_prefill_tokens=5,
        num_decode_tokens=1,
        slot_mapping=step.attn_metadata.slot_mapping,
        seq_lens=[5, 9],
        **cross,
    )
    with pytest.raises(InvalidInputError, match="not among them"):
        layer_of(problem).forward(*step[:4], meta, attn_type=kind)
    assert_same(step.kv_cache, before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("cls", [TorchSDPABackendImpl, XFormersImpl])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_mixed_step_never_waits_for_the_device(cls, listed):
    """Torch raises at whatever synchronises; the first call may, to compile."""
    lens, sizes = [33, 20, 40, 17], {"block_size": 16, "dtype": np.float16}
    problem = random_problem([20, 20, 1, 1], lens, AttentionSpec(), **sizes)
    step = step_of(problem, num_prefills=2, num_prefill_tokens=40)
    tables = tables_of(step.attn_metadata, problem, "zeros", block_size=16)
    fields = {"seq_lens": lens if listed else None, "block_tables": tables}
    meta, layer = metadata(step.attn_metadata, **fields), cls(4, 16, num_kv_heads=2)
    layer.forward(*step[:4], meta)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = layer.forward(*step[:4], meta)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close(out, reference(problem), atol=4e-3, rtol=4e-3)


@given(
    prefills=st.lists(LENGTHS, min_size=1, max_size=3),
    decodes=st.lists(st.integers(0, 10), max_size=2),
    window=st.integers(1, 8),
    seed=seeds(),
    whose=st.sampled_from(["query", "sequence"]),
)
def test_new_tokens_that_get_no_slot_are_seen_all_the_same(
    values, prefills, decodes, window, seed, whose
):
    """Behind the window at the end of the query, as vLLM's builder has it, or of the sequence."""
    queries = [q for q, _ in prefills] + [1] * len(decodes)
    contexts = [c for _, c in prefills] + decodes
    lens = [q + c for q, c in zip(queries, contexts, strict=True)]
    spec = AttentionSpec(sliding_window=window, alibi_slopes=SPECS["alibi, window"].alibi_slopes)
    problem = random_problem(queries, lens, spec, block_size=BLOCK, seed=seed)
    tokens = sum(q for q, _ in prefills)
    step = step_of(problem, num_prefills=len(prefills), num_prefill_tokens=tokens)
    slots, start = step.attn_metadata.slot_mapping.clone(), 0
    for query, context in prefills:
        end = query if whose == "query" else query + context
        slots[start : start + min(query, max(0, end - window - context))] = -1
        start += query
    meta = metadata(step.attn_metadata, slot_mapping=slots)
    out = layer_of(problem).forward(*step[:4], meta)
    assert_close(out, reference(problem), **TIGHT)


@pytest.mark.usefixtures("on_cpu")
@given(
    biased=st.booleans(),
    data=st.data(),
    prefills=st.lists(LENGTHS, min_size=1, max_size=3),
    seed=seeds(),
)
def test_any_tokens_of_prefills_may_lack_slots(biased, data, prefills, seed):
    queries = [q for q, _ in prefills]
    lens = [q + c for q, c in prefills]
    spec = AttentionSpec(causal=not biased)
    arrays = ["bias"] if biased else []
    problem = random_problem(queries, lens, spec, block_size=BLOCK, seed=seed, arrays=arrays)
    step = step_of(problem, num_prefills=len(lens), num_prefill_tokens=sum(queries))
    lacking = data.draw(st.lists(st.booleans(), min_size=sum(queries), max_size=sum(queries)))
    slots = step.attn_metadata.slot_mapping.masked_fill(torch.tensor(lacking), -1)
    meta = metadata(step.attn_metadata, slot_mapping=slots)
    meta.set_attn_bias(lists_of(problem) if biased else None, "decoder")
    assert_attention_close(layer_of(problem).forward(*step[:4], meta), None, problem)


@pytest.mark.usefixtures("on_cpu")
def test_a_block_that_is_used_again_is_read_first():
    """A table in which the blocks of a window go round, as v0's first block manager made it."""
    spec = AttentionSpec(sliding_window=8)
    problem = random_problem([10], [18], spec, block_size=BLOCK)
    step = step_of(problem)
    row = problem.block_tables[0]
    kv_cache = torch.stack([torch.from_numpy(np.array(problem.key_cache)),
                            torch.from_numpy(np.array(problem.value_cache))])  # fmt: skip
    tables = torch.tensor([[row[0], row[1], row[0], row[1], row[0]]])
    slots = [-1, -1] + [int(tables[0, p // BLOCK]) * BLOCK + p % BLOCK for p in range(10, 18)]
    meta = metadata(step.attn_metadata, slot_mapping=torch.tensor(slots), block_tables=tables)
    out = layer_of(problem).forward(*step[:3], kv_cache, meta)
    assert_close(out, reference(problem), **TIGHT)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("scales", [{"scales": "token"}, {"key_scale": 0.03, "value_scale": 0.03}])
def test_tokens_without_slots_beside_a_quantised_cache(scales):
    """They see each other as the cache would hold them, and the context with its scales."""
    context, new = 6, 9
    outs = []
    for lacking in (0, 5):
        rows = normal(0, 2, context + new, 2, 16)
        cache = write_kv_(
            init_kv_cache(4, BLOCK, 2, 16, "int8", **scales),
            *rows[:, :context], torch.arange(context),
        )  # fmt: skip
        slots = torch.tensor([-1] * lacking + [*range(context + lacking, context + new)])
        meta = AttentionMetadata.from_lists([new], [context], [[0, 1, 2, 3]], block_size=BLOCK)
        layer = TorchSDPABackendImpl(4, 16, num_kv_heads=2)
        query = normal(1, new, 4, 16)
        outs.append(
            layer.forward(query, *rows[:, context:], cache, metadata(meta, slot_mapping=slots))
        )
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-5)
