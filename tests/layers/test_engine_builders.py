"""What vLLM's model runners ask a backend for besides layers: builders, the next step, writes."""

from types import SimpleNamespace as Of
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import assume, given
from hypothesis import strategies as st
from test_engine_callers import BLOCK, PAIRS, TIGHT, cut_by_gpu, rows_of, slots_of
from torch_layers import assert_close, assert_same, layer_of, reference, step_of

from pagedattn import AttentionSpec, InvalidInputError, PagedAttentionError, UnsupportedError
from pagedattn.testing import random_problem
from pagedattn.testing.strategies import seeds
from pagedattn_torch import (
    IpexAttnBackend,
    PagedAttention,
    TorchSDPABackend,
    TorchSDPAMetadata,
    XFormersBackend,
)

pytestmark = [pytest.mark.usefixtures("layers"), pytest.mark.usefixtures("on_cpu")]
BACKENDS = (XFormersBackend, TorchSDPABackend, IpexAttnBackend)


class Placeholders:
    """A modality's map, as far as a builder knows it."""

    def __init__(self, values=()):
        self.values = list(values)

    def extend(self, other):
        self.values += other.values

    def index_map(self):
        return self.values


def group_of(query, length, row, window, prompt, chunked):
    """InterDataForSeqGroup of one sequence."""
    whole = -(-(window or 1) // BLOCK)
    shown, last = length, 0
    if window and not prompt:
        shown, last = cut_by_gpu(length, row, window)[0], whole + (length % BLOCK > 0)
    return Of(
        is_prompt=prompt, seq_ids=[7], input_tokens=[[0] * query], orig_seq_lens=[length],
        seq_lens=[shown], query_lens=[query], context_lens=[length - query],
        curr_sliding_window_blocks=[last], block_tables={7: row},
        prefix_cache_hit=prompt and not chunked and query < length,
        multi_modal_placeholder_maps={"image": Placeholders([length])} if prompt else None,
    )  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@given(
    prefills=st.lists(PAIRS, max_size=3),
    decodes=st.lists(st.integers(0, 20), max_size=3),
    window=st.sampled_from([None, 1, 5, 8]),
    chunked=st.booleans(),
    padding=st.sampled_from([-1, 0, 2]),
    seed=seeds(),
)
def test_steps_of_a_gpu_runner(backend, prefills, decodes, window, chunked, padding, seed):
    assume(prefills or decodes)
    queries = [q for q, _ in prefills] + [1] * len(decodes)
    lens = [q + c for q, c in prefills] + [c + 1 for c in decodes]
    padding = -1 if prefills else padding  # graphs are of decodes
    problem = random_problem(
        queries, lens, AttentionSpec(sliding_window=window), block_size=BLOCK, seed=seed
    )
    groups = [
        group_of(q, n, row, window, seq < len(prefills), chunked)
        for seq, (q, n, row) in enumerate(zip(queries, lens, rows_of(problem), strict=True))
    ]
    runner = Of(device="cpu", graph_block_tables=np.zeros((8, 9), np.int32))
    source = Of(runner=runner, inter_data_list=groups, chunked_prefill_enabled=chunked,
                sliding_window=window, block_size=BLOCK)  # fmt: skip
    builder = backend.make_metadata_builder(source)
    builder.prepare()
    shown = [n for group in groups for n in group.seq_lens] + [1] * max(0, padding)
    meta = builder.build(shown, queries, padding, len(shown) if padding >= 0 else -1)
    assert type(meta) is backend.get_metadata_cls()
    assert meta.use_cuda_graph is (padding >= 0)
    images = [length for group, length in zip(groups, lens, strict=True) if group.is_prompt]
    assert meta.multi_modal_placeholder_index_maps == ({"image": images} if images else {})
    step = step_of(problem)
    rows = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, max(0, padding))) for x in step[:3])
    out = layer_of(problem).forward(*rows, step.kv_cache, meta)
    assert_close(out[: sum(queries)], reference(problem), **TIGHT)
    if padding >= 0:
        assert meta.block_tables.shape == (len(shown), 9)


def test_a_profiling_run_has_no_blocks():
    """`block_tables` is None, or None for each sequence."""
    for tables in (None, {7: None}):
        group = group_of(3, 3, [], None, True, False)
        group.block_tables = tables
        runner = Of(device="cpu", graph_block_tables=None)
        source = Of(runner=runner, inter_data_list=[group], chunked_prefill_enabled=True,
                    sliding_window=None, block_size=BLOCK)  # fmt: skip
        meta = XFormersBackend.get_builder_cls()(source).build([3], [3], -1, -1)
        assert meta.slot_mapping.tolist() == [-1, -1, -1]
        assert meta.block_tables.numel() == 0


@given(
    prefills=st.lists(PAIRS, max_size=3),
    decodes=st.lists(st.integers(0, 10), max_size=3),
    seed=seeds(),
)
def test_steps_of_a_cpu_runner(prefills, decodes, seed):
    assume(prefills or decodes)
    queries = [q for q, _ in prefills] + [1] * len(decodes)
    lens = [q + c for q, c in prefills] + [c + 1 for c in decodes]
    problem = random_problem(queries, lens, AttentionSpec(), block_size=BLOCK, seed=seed)
    rows, count = rows_of(problem), len(prefills)
    data = Of(
        num_prefills=count, num_prefill_tokens=sum(queries[:count]), max_decode_seq_len=0,
        num_decode_tokens=len(decodes), slot_mapping=slots_of(queries, lens, rows),
        prefill_block_tables=rows[:count], decode_block_tables=rows[count:],
        multi_modal_inputs_list=[], multi_modal_placeholder_maps={},
    )  # fmt: skip
    source = Of(runner=Of(device="cpu"), input_data=None, chunked_prefill=True)
    builder = TorchSDPABackend.get_builder_cls()(source)
    source.input_data = data  # which a runner makes anew for each step
    builder.prepare()
    meta = builder.build(lens, queries, -1, -1)
    step = step_of(problem)
    out = layer_of(problem).forward(*step[:4], meta)
    assert_close(out, reference(problem), **TIGHT)


@pytest.mark.parametrize("whose", ["metadata", "backend"])
@given(
    lens=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    padding=st.sampled_from([0, 2]),
    listed=st.booleans(),
    seed=seeds(),
)
def test_the_next_steps(whose, lens, padding, listed, seed):
    """Three tokens more, each step in the memory of the one before."""
    ends = [n + 3 for n in lens]
    count = len(lens) + padding
    problem = random_problem([3] * len(lens), ends, AttentionSpec(), block_size=BLOCK, seed=seed)
    query, key, value, kv_cache, _ = step_of(problem)
    rows = [[*row, *[0] * 9][:9] for row in rows_of(problem)] + [[0] * 9] * padding
    tables = torch.tensor(rows, dtype=torch.int32)
    slots = torch.full((count,), -1)
    slots[: len(lens)] = torch.tensor(slots_of([1] * len(lens), lens, rows_of(problem)))
    padded = lens + [1] * padding
    meta = TorchSDPAMetadata(
        num_prefills=0, num_prefill_tokens=0, num_decode_tokens=count, slot_mapping=slots,
        seq_lens=padded if listed else None, use_cuda_graph=bool(padding),
        seq_lens_tensor=torch.tensor(padded, dtype=torch.int32), block_tables=tables,
        query_start_loc=torch.arange(len(lens) + 1, dtype=torch.int32), max_query_len=1,
        context_lens_tensor=torch.tensor([n - 1 for n in lens], dtype=torch.int32),
        max_decode_seq_len=max(padded),
    )  # fmt: skip
    model = Of(input_tokens=torch.zeros(count, dtype=torch.int64), attn_metadata=meta,
               input_positions=torch.zeros(count, dtype=torch.int64))  # fmt: skip
    memory = [x.data_ptr() for x in (meta.slot_mapping, meta.seq_lens_tensor, model.input_tokens)]
    layer, want = layer_of(problem), reference(problem).reshape(len(lens), 3, 4, -1)
    for step in range(3):
        sampled = torch.arange(len(lens))[:, None] + 10 * step
        if whose == "metadata":
            meta.advance_step(model, sampled, BLOCK, count, len(lens), False)
        else:
            TorchSDPABackend.advance_step(model, sampled, BLOCK, count, len(lens))
        new = [x.unflatten(0, (-1, 3))[:, step] for x in (query, key, value)]
        new = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, padding)) for x in new)
        out = layer.forward(*new, kv_cache, meta)
        assert_close(out[: len(lens)], want[:, step], **TIGHT)
        assert model.input_positions.tolist()[: len(lens)] == [n + step for n in lens]
        assert model.input_tokens.tolist()[: len(lens)] == sampled.flatten().tolist()
    now = [x.data_ptr() for x in (meta.slot_mapping, meta.seq_lens_tensor, model.input_tokens)]
    assert now == memory


@given(prefills=st.lists(PAIRS, min_size=1, max_size=2), decodes=st.lists(st.integers(0, 9)))
def test_prefills_become_decodes(prefills, decodes):
    queries = [q for q, _ in prefills] + [1] * len(decodes)
    contexts = [c for _, c in prefills] + decodes
    rows = [[8 * seq + i for i in range(8)] for seq in range(len(queries))]
    lists = {"query_lens": queries, "context_lens": contexts, "block_tables": rows}
    meta = TorchSDPAMetadata.from_lists(**lists, block_size=BLOCK)
    lens, count = meta.seq_lens, len(queries)
    model = Of(input_tokens=torch.zeros(count), input_positions=torch.zeros(count))
    if meta.num_prefills:
        with pytest.raises(InvalidInputError, match="turn_prefills_into_decodes"):
            meta.advance_step(model, None, BLOCK, count, count)
    meta.advance_step(model, None, BLOCK, count, count, turn_prefills_into_decodes=True)
    want = TorchSDPAMetadata.from_lists([1] * count, lens, rows, block_size=BLOCK)
    for name in ("seq_lens", "num_prefills", "num_decode_tokens", "max_query_len"):
        assert getattr(meta, name) == getattr(want, name)
    for name in ("slot_mapping", "query_start_loc", "context_lens_tensor", "seq_lens_tensor"):
        assert getattr(meta, name).tolist() == getattr(want, name).tolist()


def test_a_step_that_cannot_be_made_changes_nothing():
    meta = TorchSDPAMetadata.from_lists([1], [3], [[5]], block_size=BLOCK)
    model = Of(input_tokens=torch.zeros(1), input_positions=torch.zeros(1))
    for wrong in ((4, 2, 2), (4, 1, 2), (4, 1, 1)):  # the last one needs another block
        with pytest.raises(InvalidInputError):
            meta.advance_step(model, torch.tensor([3]), *wrong)
        assert (meta.seq_lens, meta.slot_mapping.tolist()) == ([4], [23])
        assert model.input_tokens.tolist() == [0]


TWO = {"input_tokens": [1, 2], "input_positions": [2, 3]}
# What is wrong with a step of two sequences, the first of which needs the second block next.
NOT_ADVANCED: dict[str, dict[str, Any]] = {
    "one sampled token": {"sampled": torch.tensor([5])},
    "sampled tokens in a list": {"sampled": [5, 6]},
    "a block that is missing": {"block_tables": torch.tensor([[0, -1], [1, 3]])},
    "a row that is missing": {"block_tables": torch.tensor([[0, 2]])},
    "tables without axes": {"block_tables": torch.tensor([])},
    "few positions": {"input_positions": torch.tensor([2])},
    "no positions": {"input_positions": None},
    "positions in one place": {"input_positions": torch.tensor([2]).expand(2)},
    "lengths of inference": {"seq_lens_tensor": None},
}


@pytest.mark.parametrize("case", NOT_ADVANCED)
def test_what_cannot_be_written_is_refused_before_anything_is(case):
    wrong = NOT_ADVANCED[case]
    fields = {
        "slot_mapping": torch.tensor([3, 6]),
        "seq_lens_tensor": torch.tensor([4, 3]),
        "block_tables": torch.tensor([[0, 2], [1, 3]]),
    }
    if "seq_lens_tensor" in wrong:
        with torch.inference_mode():
            wrong = {"seq_lens_tensor": torch.tensor([4, 3])}
    fields |= {name: value for name, value in wrong.items() if name in fields}
    fields |= {"num_prefills": 0, "num_prefill_tokens": 0, "num_decode_tokens": 2}
    meta = TorchSDPAMetadata(seq_lens=[4, 3], **fields)
    model = Of(**{name: wrong.get(name, torch.tensor(TWO[name])) for name in TWO})
    with pytest.raises(InvalidInputError):
        meta.advance_step(model, wrong.get("sampled", torch.tensor([[5], [6]])), 4, 2, 2)
    assert meta.seq_lens == meta.seq_lens_tensor.tolist() == [4, 3]
    assert meta.slot_mapping.tolist() == [3, 6]
    assert model.input_tokens.tolist() == [1, 2]


@pytest.mark.parametrize("window", [None, 3])
@given(lens=st.lists(PAIRS, min_size=1, max_size=3), seed=seeds())
def test_writes_and_reads_without_a_layer(window, lens, seed):
    queries, ends = [q for q, _ in lens], [q + c for q, c in lens]
    slopes = (0.5, -0.25, 0.1, 1.0)
    spec = AttentionSpec(sliding_window=window, alibi_slopes=slopes)
    problem = random_problem(queries, ends, spec, block_size=BLOCK, seed=seed)
    query, key, value, kv_cache, meta = step_of(problem)
    planes = PagedAttention.split_kv_cache(kv_cache, 2, 16)
    PagedAttention.write_to_paged_cache(key, value, *planes, meta.slot_mapping, "auto", 1.0, 1.0)
    tables, ends = meta.block_tables, meta.seq_lens_tensor
    out = PagedAttention.forward_prefix(
        query, key, value, "auto", *planes, tables, meta.query_start_loc, ends,
        meta.context_lens_tensor, max(queries), torch.tensor(slopes), window, 1.0, 1.0,
    )  # fmt: skip
    assert_close(out, reference(problem), **TIGHT)
    if window is None:
        last = meta.query_start_loc[1:].long() - 1
        got = PagedAttention.forward_decode(
            query[last], *planes, tables, ends, int(ends.max()), "auto", 2, 0.25,
            torch.tensor(slopes), 1.0, 1.0,
        )  # fmt: skip
        assert_close(got, reference(problem)[last.numpy()], **TIGHT)


# Arguments of a decode of one sequence without a layer, and what the error says of them.
NOT_TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "a scale of a cache without": ({"k_scale": 2.0}, "k_scale must be 1.0"),
    "another number of heads": ({"num_kv_heads": 3}, "num_kv_heads must be the cache's 2"),
    "two lengths": ({"seq_lens": torch.tensor([1, 1])}, "query_start_loc"),
    "lengths of two axes": ({"seq_lens": torch.tensor([[1]])}, "seq_lens"),
    "lengths in a list": ({"seq_lens": [1]}, "seq_lens must be an array"),
    "no cache": ({"key_cache": None}, "key_cache must be a torch tensor"),
    "no query": ({"query": None}, "query must be a torch tensor"),
}


@pytest.mark.parametrize("case", NOT_TAKEN)
def test_nothing_that_is_given_without_a_layer_is_ignored(case):
    wrong, text = NOT_TAKEN[case]
    planes = {name: torch.ones(1, 4, 2, 8) for name in ("key_cache", "value_cache")}
    given = {"query": torch.ones(1, 6, 8), "block_tables": torch.tensor([[0]])} | planes
    given |= {"seq_lens": torch.tensor([1]), "max_seq_len": 1, "scale": 1.0}
    given |= {"kv_cache_dtype": "auto", "num_kv_heads": 2}
    assert PagedAttention.forward_decode(**given).shape == (1, 6, 8)
    with pytest.raises(PagedAttentionError, match=text):
        PagedAttention.forward_decode(**given | wrong)


def test_slots_in_a_list_are_refused_without_a_layer():
    plane, row = torch.zeros(1, 4, 2, 8), torch.ones(1, 2, 8)
    with pytest.raises(InvalidInputError, match="slot_mapping must be an array"):
        PagedAttention.write_to_paged_cache(row, row, plane, plane.clone(), [0])
    with pytest.raises(UnsupportedError, match=r"k_scale must be 1\.0"):
        PagedAttention.write_to_paged_cache(
            row, row, plane, plane.clone(), torch.tensor([0]), "auto", 2.0
        )


@pytest.mark.parametrize("cached", [True, False])
def test_a_captured_step_is_padded_with_sequences_of_no_tokens(cached):
    """Whose tokens num_decode_tokens counts: they see nothing, and nothing is missing of them."""
    layer, rows = TorchSDPABackend.get_impl_cls()(4, 8, num_kv_heads=2), torch.randn(3, 4, 8)
    kv_cache = torch.randn(2, 2, 4, 2, 8) if cached else None
    meta = TorchSDPAMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=3,
        slot_mapping=torch.tensor([0, -1, -1]),
        seq_lens=[1, 0, 0],
        block_tables=torch.zeros(3, 1, dtype=torch.int32) if cached else None,
        query_start_loc=torch.tensor([0, 1]),
        use_cuda_graph=True,
    )
    out = layer.forward(rows, rows[:, :2], rows[:, 2:], kv_cache, meta).view(3, 4, 8)
    assert_close(out[0], rows[0, [2, 2, 3, 3]].double().numpy(), atol=1e-6)


def test_blocks_are_moved_by_either_name():
    cache = torch.randn(2, 4, 3)
    moved = [cache.clone() for _ in range(2)]
    PagedAttention.copy_blocks([moved[0]], {0: [2]})
    XFormersBackend.copy_blocks([moved[1]], {0: [2]})
    assert_same(*moved)
    PagedAttention.swap_blocks(cache, moved[0], {1: 3})
    assert_same(moved[0][:, 3], cache[:, 1])
    assert PagedAttention.get_kv_cache_shape(4, 16, 2, 64) == (2, 4, 16, 2, 64)
    sizes = {32, 64, 80, 96, 112, 120, 128, 192, 256}
    assert sizes <= {*PagedAttention.get_supported_head_sizes()}
    assert sizes <= {*XFormersBackend.get_supported_head_sizes()}
