"""Metadata: what is derived, how it is split, and its way to the core's batches and back."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import assert_words
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_interop import to_jax, to_torch

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    UnsupportedError,
    attention_bias,
    make_batch,
)
from pagedattn.testing import batch_of, random_problem
from pagedattn.testing.strategies import problems
from pagedattn_torch import AttentionMetadata, TorchSDPAMetadata, XFormersMetadata

KINDS = ("decoder", "encoder", "encoder_only", "encoder_decoder")
ARRAYS = ("block_tables", "seq_lens", "query_start_loc", "slot_mapping", "positions")


def mixed(cls=AttentionMetadata, **fields):
    """Two prefills, one with a context, and two decodes, by the seeds' keywords."""
    values = {
        "num_prefills": 2,
        "num_prefill_tokens": 5,
        "num_decode_tokens": 2,
        "slot_mapping": torch.tensor([0, 1, 2, 13, 14, 20, 33]),
        "seq_lens": [3, 7, 5, 2],
        "context_lens_tensor": torch.tensor([0, 5, 4, 1], dtype=torch.int32),
        "block_tables": torch.tensor([[0, 0], [2, 3], [4, 5], [8, 0]], dtype=torch.int32),
    }
    return cls(**values | fields)


def encoder_fields(**fields):
    return {
        "encoder_seq_lens": [4, 1, 6, 2],
        "cross_slot_mapping": torch.arange(5),
        "cross_block_tables": torch.tensor([[0, 0], [1, 0], [2, 3], [4, 0]]),
    } | fields


def values(meta):
    """The fields as plain values."""
    fields = meta.asdict_zerocopy().items()
    return {k: v.tolist() if isinstance(v, torch.Tensor) else v for k, v in fields}


def test_no_fields_are_skipped_by_none_as_engines_call_it():
    meta = mixed()
    assert meta.asdict_zerocopy(None).keys() == meta.asdict_zerocopy().keys()
    skipped = meta.asdict_zerocopy().keys() - meta.asdict_zerocopy({"seq_lens"}).keys()
    assert skipped == {"seq_lens"}
    with pytest.raises(InvalidInputError, match="skip_fields"):
        meta.asdict_zerocopy(3)


def test_lengths_are_derived():
    meta = mixed()
    assert meta.seq_lens_tensor.tolist() == [3, 7, 5, 2]
    assert meta.seq_lens_tensor.dtype == meta.query_start_loc.dtype == torch.int32
    assert meta.query_start_loc.tolist() == [0, 3, 5, 6, 7]
    assert meta.seq_start_loc.tolist() == [0, 3, 10, 15, 17]
    assert (meta.max_query_len, meta.max_decode_query_len) == (3, 1)
    assert (meta.max_prefill_seq_len, meta.max_decode_seq_len) == (7, 5)
    assert meta.is_prompt is False


def test_lists_and_tensors_make_the_same():
    listed = mixed()
    by_tensor = mixed(seq_lens=None, seq_lens_tensor=torch.tensor([3, 7, 5, 2], dtype=torch.int32))
    by_starts = mixed(context_lens_tensor=None, query_start_loc=listed.query_start_loc)
    assert values(listed) == values(by_tensor) == values(by_starts)


def test_arrays_of_other_frameworks_are_taken_without_a_copy():
    tables = jnp.array([[0, 1], [2, 3], [4, 5], [8, 0]], jnp.int32)
    slots = np.array([0, 1, 2, 13, 14, 20, 33])
    meta = mixed(block_tables=tables, slot_mapping=slots)
    assert meta.block_tables.data_ptr() == tables.unsafe_buffer_pointer()
    assert meta.slot_mapping.data_ptr() == slots.ctypes.data


def test_it_keeps_its_own_list():
    lens = [3, 7, 5, 2]
    meta = mixed(seq_lens=lens)
    lens[0] = 9
    assert meta.seq_lens == [3, 7, 5, 2]


def assigned(meta, fields):
    for name, value in fields.items():
        setattr(meta, name, value)
    return meta


@given(data=st.data())
def test_fields_may_be_assigned_in_any_order(data):
    """Encoders as a model runner adds them to a step, and those of another step over them."""
    lens = [4, 1, 6, 2]
    fields = {"num_encoder_tokens": 5, "encoder_seq_lens_tensor": torch.tensor(lens)}
    fields |= encoder_fields(max_encoder_seq_len=6)
    other = {name: value for name, value in fields.items() if name != "num_encoder_tokens"}
    other |= {"encoder_seq_lens": [9, 1, 6, 2], "max_encoder_seq_len": 9}
    other |= {"encoder_seq_lens_tensor": torch.tensor([9, 1, 6, 2]), "num_encoder_tokens": 10}
    meta = mixed()
    for step in (fields, other):
        order = data.draw(st.permutations(list(step)))
        assigned(meta, {name: step[name] for name in order})
        assert values(meta) == values(mixed(**step))


def test_what_follows_from_an_assigned_field_is_derived_anew():
    meta = assigned(mixed(), {"seq_lens": [4, 8, 6, 3], "context_lens_tensor": None})
    meta.context_lens_tensor = torch.tensor([1, 6, 5, 2])
    assert meta.seq_lens_tensor.tolist() == [4, 8, 6, 3]
    assert (meta.max_prefill_seq_len, meta.max_decode_seq_len) == (8, 6)
    assert meta.prefill_metadata.seq_lens == [4, 8]
    assert not meta.is_all_encoder_attn_metadata_set
    meta.encoder_seq_lens = [4, 1, 6, 2]
    assert meta.is_all_encoder_attn_metadata_set
    assert meta.encoder_seq_lens_tensor.tolist() == [4, 1, 6, 2]


def test_assigned_contradictions_are_refused_at_the_next_look():
    meta = mixed()
    meta.num_prefill_tokens = 6
    with pytest.raises(InvalidInputError, match="num_prefill_tokens"):
        _ = meta.seq_lens
    meta.num_prefill_tokens = 5
    assert values(meta) == values(mixed())


def padded_for_a_graph(**fields):
    """Two decodes in a graph of four: all is padded but query_start_loc and the contexts."""
    return AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=4,
        slot_mapping=torch.tensor([20, 33, -1, -1]),
        seq_lens=[5, 2, 1, 1],
        seq_lens_tensor=torch.tensor([5, 2, 1, 1]),
        block_tables=torch.tensor([[4, 5], [8, 0], [0, 0], [0, 0]]),
        query_start_loc=torch.tensor([0, 1, 2]),
        seq_start_loc=torch.tensor([0, 5, 7, 8, 9]),
        context_lens_tensor=torch.tensor([4, 1]),
        max_query_len=1,
        **{"use_cuda_graph": True} | fields,
    )


def test_padding_for_a_captured_graph():
    """The sequences that pad bring no tokens; the tokens that pad belong to none."""
    meta = padded_for_a_graph()
    assert meta.query_start_loc.tolist() == [0, 1, 2, 2, 2]
    assert meta.context_lens_tensor.tolist() == [4, 1, 1, 1]
    assert meta.get_seq_lens("decoder") == ([1, 1, 0, 0], [5, 2, 1, 1])
    assert values(meta.decode_metadata) == values(meta)


def test_padding_is_for_captured_graphs_alone():
    with pytest.raises(InvalidInputError, match="query_start_loc"):
        padded_for_a_graph(use_cuda_graph=False)


COUNTS = ("num_prefills", "num_prefill_tokens", "num_decode_tokens", "num_encoder_tokens")
BOUNDS = tuple(f.name for f in dataclasses.fields(AttentionMetadata) if f.name.startswith("max_"))


@pytest.mark.parametrize("value", ["2", 2.0, -1, [2], object(), True, np.float32(2), float("nan")])
@pytest.mark.parametrize("name", [*COUNTS, *BOUNDS])
def test_counts_and_bounds_are_integers(name, value):
    with pytest.raises(InvalidInputError, match=name):
        mixed(**encoder_fields() | {name: value})


@pytest.mark.parametrize("integer", [int, np.int64, torch.tensor])
def test_counts_and_bounds_of_any_integers(integer):
    bounds = dict.fromkeys(BOUNDS, integer(9)) | {"num_encoder_tokens": integer(5)}
    counts = {"num_prefills": integer(2), "num_prefill_tokens": integer(5)}
    meta = mixed(**encoder_fields() | bounds | counts)
    assert all(type(getattr(meta, name)) is int for name in (*BOUNDS, *COUNTS))


WRONG = {
    "two forms": ({"seq_lens_tensor": torch.tensor([3, 7, 5, 3])}, "seq_lens_tensor"),
    "prefill tokens": ({"num_prefill_tokens": 6}, "num_prefill_tokens"),
    "decode tokens": ({"num_decode_tokens": 3}, "decode"),
    "sequences": ({"num_prefills": 5}, "num_prefills"),
    "slots": ({"slot_mapping": torch.arange(6)}, "slot_mapping"),
    "starts": ({"query_start_loc": torch.tensor([0, 3, 5, 6])}, "query_start_loc"),
    "context": ({"context_lens_tensor": torch.tensor([0, 5, 3, 1])}, "context_lens"),
    "seq starts": ({"seq_start_loc": torch.tensor([0, 3, 10, 15, 18])}, "seq_start_loc"),
    "bound": ({"max_query_len": 2}, "max_query_len"),
    "prefill bound": ({"max_prefill_seq_len": 6}, "max_prefill_seq_len"),
    "decode bound": ({"max_decode_seq_len": 4}, "max_decode_seq_len"),
    "prompt": ({"is_prompt": True}, "is_prompt"),
    "encoder bound": (encoder_fields(max_encoder_seq_len=5), "max_encoder_seq_len"),
    "half an encoder": (encoder_fields(num_encoder_tokens=3), "encoder"),
}


@pytest.mark.parametrize("name", WRONG)
def test_contradictions_are_refused(name):
    fields, word = WRONG[name]
    with pytest.raises(InvalidInputError) as error:
        mixed(**fields)
    assert_words(error, [word])


def test_bounds_may_be_wide():
    meta = mixed(max_query_len=64, max_prefill_seq_len=128, max_decode_seq_len=4096)
    assert (meta.max_query_len, meta.max_decode_seq_len) == (64, 4096)
    assert meta.prefill_metadata.max_query_len == 64
    assert meta.decode_metadata.max_query_len == 1
    assert meta.decode_metadata.max_decode_seq_len == 4096


def test_split_of_both():
    meta = mixed(XFormersMetadata, **encoder_fields())
    prefill, decode = meta.prefill_metadata, meta.decode_metadata
    assert type(prefill) is type(decode) is XFormersMetadata
    assert (prefill.num_prefills, prefill.num_prefill_tokens, prefill.num_decode_tokens) == (
        2,
        5,
        0,
    )
    assert (decode.num_prefills, decode.num_prefill_tokens, decode.num_decode_tokens) == (0, 0, 2)
    assert prefill.slot_mapping.tolist() == [0, 1, 2, 13, 14]
    assert decode.slot_mapping.tolist() == [20, 33]
    assert (prefill.seq_lens, decode.seq_lens) == ([3, 7], [5, 2])
    assert prefill.context_lens_tensor.tolist() == [0, 5]
    assert prefill.query_start_loc.tolist() == [0, 3, 5]
    assert decode.query_start_loc.tolist() == [0, 1, 2]
    assert decode.block_tables.tolist() == [[4, 5], [8, 0]]
    assert (prefill.is_prompt, decode.is_prompt) == (True, False)
    assert (prefill.max_decode_seq_len, decode.max_prefill_seq_len) == (0, 0)
    # encoders: the prefills bring theirs in this step, those of the decodes are cached
    assert (prefill.encoder_seq_lens, decode.encoder_seq_lens) == ([4, 1], [6, 2])
    assert (prefill.num_encoder_tokens, decode.num_encoder_tokens) == (5, 0)
    assert prefill.cross_slot_mapping.tolist() == [0, 1, 2, 3, 4]
    assert decode.cross_slot_mapping.tolist() == []
    assert decode.cross_block_tables.tolist() == [[2, 3], [4, 0]]


def test_split_where_every_encoder_runs():
    meta = mixed(**encoder_fields(cross_slot_mapping=torch.arange(13)))
    prefill, decode = meta.prefill_metadata, meta.decode_metadata
    assert (prefill.num_encoder_tokens, decode.num_encoder_tokens) == (5, 8)
    assert decode.cross_slot_mapping.tolist() == list(range(5, 13))
    assert decode.encoder_query_start_loc.tolist() == [0, 6, 8]


@pytest.mark.parametrize("half", ["prefill_metadata", "decode_metadata"])
def test_split_of_one_kind_is_itself(half):
    meta = getattr(mixed(use_cuda_graph=True, **encoder_fields()), half)
    other = {"prefill_metadata": "decode_metadata"}.get(half, "prefill_metadata")
    assert getattr(meta, other) is None
    assert values(getattr(meta, half)) == values(meta)


def test_split_of_nothing():
    meta = AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        slot_mapping=torch.zeros(0, dtype=torch.int32),
        seq_lens=[],
    )
    assert meta.prefill_metadata is meta.decode_metadata is None
    assert meta.query_start_loc.tolist() == [0]


def test_split_shares_memory():
    meta = mixed()
    assert meta.decode_metadata.block_tables.data_ptr() == meta.block_tables[2:].data_ptr()
    assert meta.prefill_metadata.slot_mapping.data_ptr() == meta.slot_mapping.data_ptr()


def test_encoders_alone():
    """A run of encoders only, as the seeds build it: no decoder lengths at all."""
    meta = TorchSDPAMetadata(
        num_prefills=2,
        num_prefill_tokens=0,
        num_decode_tokens=0,
        slot_mapping=None,
        encoder_seq_lens=[4, 2],
        is_prompt=True,
    )
    assert meta.num_encoder_tokens == 6
    assert meta.is_all_encoder_attn_metadata_set
    assert not meta.is_all_cross_attn_metadata_set
    assert meta.prefill_metadata.num_encoder_tokens == 6


def test_which_fields_are_set():
    assert not mixed().is_all_encoder_attn_metadata_set
    encoder = mixed(encoder_seq_lens=[4, 1, 6, 2])
    assert encoder.is_all_encoder_attn_metadata_set
    assert not encoder.is_all_cross_attn_metadata_set
    assert mixed(**encoder_fields()).is_all_cross_attn_metadata_set


def test_lengths_by_type():
    meta = mixed(**encoder_fields())
    own, keys = [3, 2, 1, 1], [3, 7, 5, 2]
    assert meta.get_seq_lens("decoder") == meta.get_seq_lens("encoder_only") == (own, keys)
    assert meta.get_seq_lens("encoder") == ([4, 1, 0, 0], [4, 1, 0, 0])
    assert meta.get_seq_lens("encoder_decoder") == (own, [4, 1, 6, 2])
    tokens = meta.get_num_prefill_decode_query_kv_tokens
    assert tokens("encoder") == (5, 5, 0)
    assert tokens("encoder_decoder") == (5, 5, 2)
    assert tokens("decoder") == tokens("encoder_only") == (5, 5, 2)


@pytest.mark.parametrize("is_prompt", [True, False])
def test_tables_by_type(is_prompt):
    meta = mixed(**encoder_fields())
    args = {k: meta.get_seq_len_block_table_args(k, is_prompt=is_prompt) for k in KINDS}
    own = (meta.seq_lens_tensor, 7 if is_prompt else 5, meta.block_tables)
    assert args["decoder"] == args["encoder_only"] == own
    assert args["encoder"] == (meta.encoder_seq_lens_tensor, 6, None)
    assert args["encoder_decoder"] == (meta.encoder_seq_lens_tensor, 6, meta.cross_block_tables)


@pytest.mark.parametrize(
    "call",
    [
        lambda meta: meta.get_seq_lens("prefix"),
        lambda meta: meta.get_attn_bias("prefix"),
        lambda meta: meta.get_seq_len_block_table_args("prefix", is_prompt=True),
        lambda meta: meta.get_num_prefill_decode_query_kv_tokens("prefix"),
        lambda meta: meta.to_batch(4, "prefix"),
    ],
)
def test_an_unknown_type_lists_the_four(call):
    with pytest.raises(InvalidInputError) as error:
        call(mixed())
    assert_words(error, [*KINDS, "'prefix'"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [None, 2])
def test_bias_is_the_cores(kind, window):
    meta = mixed(**encoder_fields())
    spec = AttentionSpec(sliding_window=window, alibi_slopes=(0.5, -1.0))
    biases = meta.get_attn_bias(kind, spec)
    spec = dataclasses.replace(spec, causal=kind == "decoder")
    lens = meta.get_seq_lens(kind)
    assert len(biases) == 4
    for bias, q, k in zip(biases, *lens, strict=True):
        want = attention_bias(np.arange(k - q, k), np.arange(k), spec)
        np.testing.assert_array_equal(bias.numpy(), want)
    again = meta.get_attn_bias(kind, spec)
    assert all(a is not b for a, b in zip(biases, again, strict=True))  # nothing is kept


@given(problem=problems(dtype=np.float32))
def test_there_and_back(problem):
    """A batch survives the way through metadata, over the same memory."""
    batch = batch_of(problem.replace(parents=None))
    meta = AttentionMetadata.from_batch(batch)
    back = meta.to_batch(batch.block_size)
    for name in ARRAYS:
        there, here = getattr(batch, name), getattr(back, name)
        np.testing.assert_array_equal(here.cpu().numpy(), there)
        if name != "positions" and there.size:
            assert here.data_ptr() == there.unsafe_buffer_pointer(), name
    assert (back.block_size, back.max_query_len) == (batch.block_size, batch.max_query_len)
    for name in ARRAYS[:4]:
        if getattr(back, name).numel():
            shared = to_jax(getattr(back, name)).unsafe_buffer_pointer()
            assert shared == getattr(batch, name).unsafe_buffer_pointer()


@pytest.mark.usefixtures("on_cpu")
@given(problem=problems(dtype=np.float32), data=st.data())
def test_halves_make_the_whole(problem, data):
    """Prefills and decodes of any batch: their tokens and sequences, in order, are all of them."""
    meta = AttentionMetadata.from_batch(batch_of(problem.replace(parents=None)))
    halves = [half for half in (meta.prefill_metadata, meta.decode_metadata) if half]
    slots = [slot for half in halves for slot in half.slot_mapping.tolist()]
    tokens = meta.num_prefill_tokens + meta.num_decode_tokens
    assert slots[:tokens] == meta.slot_mapping.tolist()[:tokens]
    lens = [pair for half in halves for pair in zip(*half.get_seq_lens("decoder"), strict=True)]
    assert [pair for pair in lens if pair[0]] == [
        pair for pair in zip(problem.query_lens, problem.seq_lens, strict=True) if pair[0]
    ]


def test_from_lists_with_encoders():
    meta = TorchSDPAMetadata.from_lists(
        [2, 1],
        [0, 3],
        [[0], [1]],
        block_size=4,
        encoder_lens=[3, 5],
        cross_block_tables=[[7], [8, 9]],
    )
    assert type(meta) is TorchSDPAMetadata
    assert (meta.num_prefills, meta.num_encoder_tokens) == (1, 3)
    assert meta.cross_slot_mapping.tolist() == [28, 29, 30]
    assert meta.encoder_seq_lens == [3, 5]
    cross = meta.to_batch(4, "encoder_decoder")
    assert cross.seq_lens.tolist() == [3, 5]
    assert cross.positions.tolist() == [1, 2, 4]
    assert cross.slot_mapping.tolist() == [-1, -1, -1]


def test_encoders_are_packed_batches():
    meta = mixed(**encoder_fields())
    batch = meta.to_batch(16, "encoder")
    assert (batch.block_size, batch.num_tokens) == (1, 5)
    assert batch.seq_lens.tolist() == [4, 1, 0, 0]
    with pytest.raises(InvalidInputError, match="context_lens"):
        meta.to_batch(16, "encoder_only")
    with pytest.raises(InvalidInputError, match="encoder_seq_lens"):
        mixed().to_batch(16, "encoder")


def test_int64_that_does_not_fit_is_no_slot():
    slots = torch.tensor([0, 1, 2, 13, 14, 2**32 + 20, 33])
    assert mixed(slot_mapping=slots).to_batch(4).slot_mapping.tolist()[5] == -1


@pytest.mark.usefixtures("on_cpu")
def test_padding_follows_the_decodes():
    problem = random_problem([3, 1, 0], [3, 5, 0], AttentionSpec(), pad_tokens=7)
    meta = AttentionMetadata.from_batch(batch_of(problem))
    assert (meta.num_prefill_tokens, meta.num_decode_tokens) == (3, 1)
    assert len(meta.decode_metadata.slot_mapping) == 4
    assert meta.decode_metadata.query_start_loc.tolist() == [0, 1, 1]


def test_a_batch_of_torch_tensors():
    batch = to_torch(make_batch([3, 1], [0, 4], [[0], [1, 2]], block_size=4))
    meta = AttentionMetadata.from_batch(batch, num_prefills=1, num_prefill_tokens=3)
    assert meta.slot_mapping.data_ptr() == batch.slot_mapping.data_ptr()


def test_several_tokens_a_decode():
    """Speculative steps: query_start_loc says how many tokens each decode brings."""
    meta = AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=6,
        slot_mapping=torch.arange(6),
        seq_lens=[9, 12],
        query_start_loc=torch.tensor([0, 3, 6]),
    )
    assert meta.context_lens_tensor.tolist() == [6, 9]
    assert meta.max_decode_query_len == meta.decode_metadata.max_query_len == 3


def lengths(**fields):
    values = {"num_prefills": 1, "num_prefill_tokens": 2, "num_decode_tokens": 0, "seq_lens": [2]}
    return AttentionMetadata(**values | fields)


def lists(**fields):
    values = {"query_lens": [2, 1], "context_lens": [0, 3], "block_tables": [[0], [1]]}
    return AttentionMetadata.from_lists(**values | {"block_size": 4} | fields)


BAD_LENGTHS = {
    "negative": (lambda: lengths(seq_lens=[-2]), ["seq_lens", "negative", "-2"]),
    "fraction": (lambda: lengths(seq_lens=[2.0]), ["seq_lens", "integers", "float"]),
    "negative tensor": (
        lambda: lengths(seq_lens=None, seq_lens_tensor=torch.tensor([-2])),
        ["seq_lens_tensor", "negative", "-2"],
    ),
    "tensor of fractions": (
        lambda: lengths(seq_lens=None, seq_lens_tensor=torch.tensor([2.0])),
        ["seq_lens_tensor", "integers", "float"],
    ),
    "slots as a list": (lambda: lengths(slot_mapping=[0, 1]), ["slot_mapping", "list"]),
    "rows as lists": (lambda: lengths(block_tables=[[0, 1]]), ["block_tables", "list"]),
    "flat table": (lambda: lengths(block_tables=torch.arange(2)), ["block_tables", "2 dim"]),
    "too many rows": (
        lambda: lengths(block_tables=torch.zeros(3, 1, dtype=torch.int32)),
        ["block_tables", "3"],
    ),
    "too many cross rows": (
        lambda: mixed(**encoder_fields(cross_block_tables=torch.zeros(9, 1, dtype=torch.int32))),
        ["cross_block_tables", "9"],
    ),
    "too few rows": (
        lambda: mixed(block_tables=torch.zeros(1, 1, dtype=torch.int32)).to_batch(16),
        ["block_tables", "4"],
    ),
    "no tables": (lambda: lengths().to_batch(16), ["block_tables", "None"]),
    "blocks of 0": (lambda: mixed().to_batch(0), ["block_size", "0"]),
    "packed blocks of 0": (
        lambda: mixed(**encoder_fields()).to_batch(0, "encoder"),
        ["block_size"],
    ),
    "no cross tables": (lambda: lists(encoder_lens=[3, 5]), ["cross_block_tables", "alone"]),
    "no encoder lengths": (lambda: lists(cross_block_tables=[[1], [2]]), ["encoder_lens", "alone"]),
    "short": (
        lambda: lists(encoder_lens=[3], cross_block_tables=[[1]]),
        ["encoder_lens", "2 sequences", "1"],
    ),
    "short context": (lambda: lists(context_lens=[0]), ["context_lens", "2 sequences", "1"]),
}


@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_bad_lengths_are_named(name):
    call, words = BAD_LENGTHS[name]
    with pytest.raises(InvalidInputError) as error:
        call()
    assert_words(error, words)


@pytest.mark.parametrize("kind", ["encoder", "encoder_decoder"])
@pytest.mark.parametrize("call", ["get_seq_lens", "get_attn_bias"])
def test_missing_encoders_are_said_to_be_missing(call, kind):
    with pytest.raises(InvalidInputError, match=r"encoder_seq_lens_tensor.*None"):
        getattr(mixed(), call)(kind)


def test_lengths_elsewhere_are_said_to_lie_there():
    meta = lengths(seq_lens=None, seq_lens_tensor=torch.ones(1, dtype=torch.int32, device="meta"))
    with pytest.raises(InvalidInputError, match="GPU"):
        meta.get_seq_lens("decoder")


def test_lengths_without_values_are_refused():
    """A meta tensor, where others have values."""
    starts = torch.zeros(3, dtype=torch.int32, device="meta")
    with pytest.raises(InvalidInputError, match=r"query_start_loc.*meta"):
        AttentionMetadata(
            num_prefills=2,
            num_prefill_tokens=4,
            num_decode_tokens=0,
            slot_mapping=torch.arange(4),
            seq_lens=[2, 2],
            query_start_loc=starts,
        )


def test_a_batch_of_drafts_that_branch_is_refused():
    batch = make_batch([2], [4], [[0, 1]], block_size=4, parents=[-1, -1])
    with pytest.raises(UnsupportedError, match="parents: the metadata of layers"):
        AttentionMetadata.from_batch(batch)
