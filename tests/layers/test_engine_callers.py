"""Steps as vLLM's v0 runners give them, literally: their fields, their types, what they leave out.

Each runner of 2024-07 to 2025-03 is a function here that makes the fields it passes; the layer's
result is held to the oracle, and the same metadata goes once through the engine's broadcast.
"""

import dataclasses
import enum
import itertools

import pytest

torch = pytest.importorskip("torch")

from hypothesis import assume, given
from hypothesis import strategies as st
from torch_layers import (
    assert_close,
    dense,
    hide_values,
    layer_of,
    new_layer,
    normal,
    reference,
    spec_of,
    step_of,
)

from pagedattn import AttentionSpec, InvalidInputError
from pagedattn.testing import random_problem
from pagedattn.testing.strategies import seeds
from pagedattn_torch import (
    AttentionType,
    IpexAttnBackend,
    TorchSDPABackend,
    TorchSDPAMetadata,
    XFormersBackend,
)

pytestmark = pytest.mark.usefixtures("layers")
TIGHT = {"atol": 2e-5, "rtol": 2e-5}
BLOCK = 4
LENGTHS = st.lists(st.integers(1, 11), min_size=1, max_size=4)
PAIRS = st.tuples(st.integers(1, 9), st.integers(0, 10))


class Numbered(enum.Enum):
    """vLLM's types until 0.6.3."""

    DECODER = enum.auto()
    ENCODER = enum.auto()
    ENCODER_DECODER = enum.auto()


class Strings:
    """vLLM's types since 0.6.4."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


def padded(rows, dtype=torch.int):
    """As `make_tensor_with_pad` does, with 0."""
    width = max(map(len, rows), default=0)
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)


def slots_of(queries, lens, rows):
    spans = zip(queries, lens, rows, strict=True)
    return [
        row[p // BLOCK] * BLOCK + p % BLOCK for q, n, row in spans for p in range(n - q, n)
    ]  # fmt: skip


def starts_of(lens):
    return list(itertools.accumulate(lens, initial=0))


def cpu_prompts(lens, rows):
    """CPUModelRunner, 0.5 to 0.6.3."""
    return {
        "is_prompt": True,
        "seq_lens": lens,
        "seq_lens_tensor": torch.tensor([]),
        "max_decode_seq_len": 0,
        "num_prefills": len(lens),
        "num_prefill_tokens": sum(lens),
        "num_decode_tokens": 0,
        "block_tables": torch.tensor([]),
        "slot_mapping": torch.tensor(slots_of(lens, lens, rows)),
    }


def xpu_prompts(lens, rows):
    """XPUModelRunner, 0.6 to 0.8."""
    return cpu_prompts(lens, rows) | {
        "seqlen_q": torch.cumsum(torch.tensor([0, *lens]), dim=0),
        "max_seqlen": max(lens),
        "block_tables": torch.tensor([], dtype=torch.int),
        "multi_modal_placeholder_index_maps": None,
        "enable_kv_scales_calculation": False,
    }


def early_xpu_prompts(lens, rows):
    """XPUModelRunner of 0.5."""
    return xpu_prompts(lens, rows) | {"seq_lens_tensor": None, "max_decode_seq_len": None}


def cpu_decodes(lens, rows):
    return {
        "is_prompt": False,
        "slot_mapping": torch.tensor(slots_of([1] * len(lens), lens, rows)),
        "seq_lens": lens,
        "seq_lens_tensor": torch.tensor(lens, dtype=torch.int),
        "max_decode_seq_len": max(lens),
        "num_prefill_tokens": 0,
        "num_decode_tokens": len(lens),
        "num_prefills": 0,
        "block_tables": padded(rows),
    }


def xpu_decodes(lens, rows):
    return cpu_decodes(lens, rows) | {"seqlen_q": torch.tensor([]), "max_seqlen": 0}


def early_xpu_decodes(lens, rows):
    return cpu_decodes(lens, rows) | {"seqlen_q": None, "max_seqlen": None}


def cpu_step(queries, lens, rows, num_prefills, chunked):
    """CPUModelRunner's builder, 0.6.4 to 0.8: what is whose depends on the step."""
    first, last = slice(num_prefills), slice(num_prefills, None)
    decodes = len(lens) - num_prefills
    apart = dict.fromkeys(
        ("prefill_block_tables", "query_start_loc", "kv_start_loc", "max_query_len", "max_kv_len")
    )
    if chunked and num_prefills:
        apart = {
            "prefill_block_tables": padded(rows[first]),
            "query_start_loc": torch.tensor(starts_of(queries[first]), dtype=torch.int32),
            "kv_start_loc": torch.tensor(starts_of(lens[first]), dtype=torch.int32),
            "max_query_len": max(queries[first]),
            "max_kv_len": max(lens[first]),
        }
    return apart | {
        "chunked_prefill": chunked,
        "seq_lens": lens[first],
        "seq_lens_tensor": torch.tensor(lens[last] if decodes else lens[first], dtype=torch.int32),
        "max_decode_seq_len": max(lens[last], default=0),
        "num_prefills": num_prefills,
        "num_prefill_tokens": sum(queries[first]),
        "num_decode_tokens": decodes,
        "block_tables": padded(rows[last]) if decodes else torch.tensor([]),
        "slot_mapping": torch.tensor(slots_of(queries, lens, rows)),
        "multi_modal_placeholder_index_maps": None,
        "enable_kv_scales_calculation": False,
    }


def rows_of(problem):
    counts = [-(-int(n) // BLOCK) for n in problem.seq_lens]
    return [list(map(int, row[:n])) for row, n in zip(problem.block_tables, counts, strict=True)]


def broadcast(backend, meta):
    """What a worker makes of the fields that the driver sends it."""
    sent = meta.asdict_zerocopy()
    names = (field.name for field in dataclasses.fields(backend.get_metadata_cls()))
    return backend.make_metadata(**{n: sent[n] for n in names if sent.get(n) is not None})


def check(problem, fields, backend=TorchSDPABackend, **options):
    """The literal step, the same after a broadcast, and its halves."""
    metas = [backend.make_metadata(**fields)]
    metas.append(broadcast(backend, metas[0]))
    for meta in metas:
        step = step_of(problem)
        out = layer_of(problem).forward(*step[:4], meta, **options)
        assert_close(out, reference(problem), **TIGHT)
    return metas[0]


@pytest.fixture(params=["read", "unread"])
def values(request, monkeypatch):
    if request.param == "unread":
        hide_values(monkeypatch)


@pytest.mark.parametrize("fields", [cpu_prompts, xpu_prompts, early_xpu_prompts])
@given(lens=LENGTHS, seed=seeds(), window=st.sampled_from([None, 3]))
def test_prompts_of_cpu_and_xpu_runners(values, fields, lens, seed, window):
    spec = AttentionSpec(sliding_window=window)
    problem = random_problem(lens, lens, spec, block_size=BLOCK, seed=seed)
    passed = fields(lens, rows_of(problem))
    meta = check(problem, passed)
    assert meta.seq_lens == lens
    if "max_seqlen" in passed:  # a bound that needs no look at the lengths
        assert meta.max_query_len == max(lens)


@pytest.mark.parametrize("fields", [cpu_decodes, xpu_decodes, early_xpu_decodes])
@given(lens=LENGTHS, seed=seeds())
def test_decodes_of_cpu_and_xpu_runners(values, fields, lens, seed):
    problem = random_problem([1] * len(lens), lens, AttentionSpec(), block_size=BLOCK, seed=seed)
    check(problem, fields(lens, rows_of(problem)), backend=IpexAttnBackend)


@given(
    prefills=st.lists(PAIRS, max_size=3),
    decodes=st.lists(st.integers(0, 10), max_size=3),
    seed=seeds(),
)
def test_steps_of_the_cpu_builder(values, prefills, decodes, seed):
    """Chunks, prefix hits and decodes, together and alone."""
    assume(prefills or decodes)
    queries = [q for q, _ in prefills] + [1] * len(decodes)
    lens = [q + c for q, c in prefills] + [c + 1 for c in decodes]
    problem = random_problem(queries, lens, AttentionSpec(), block_size=BLOCK, seed=seed)
    meta = check(problem, cpu_step(queries, lens, rows_of(problem), len(prefills), True))
    assert meta.query_start_loc.tolist() == starts_of(queries)
    assert len(meta.block_tables) in (len(lens), 0)


@pytest.mark.parametrize("prompts", [True, False])
@given(lens=LENGTHS, seed=seeds())
def test_steps_of_the_cpu_builder_without_chunks(values, prompts, lens, seed):
    queries = lens if prompts else [1] * len(lens)
    problem = random_problem(queries, lens, AttentionSpec(), block_size=BLOCK, seed=seed)
    rows = rows_of(problem)
    check(problem, cpu_step(queries, lens, rows, len(lens) * prompts, False))


def test_what_is_of_the_prefills_alone_must_fit():
    fields = cpu_step([3, 1], [5, 4], [[0, 1], [2]], 1, True)
    for wrong in (
        {"kv_start_loc": torch.tensor([0, 4])},
        {"max_kv_len": 4},
        {"prefill_block_tables": padded([[0], [1]])},
        {"query_start_loc": torch.tensor([0, 2])},
    ):
        with pytest.raises(InvalidInputError):
            TorchSDPAMetadata(**fields | wrong)
    with pytest.raises(InvalidInputError, match="seqlen_q"):
        TorchSDPAMetadata(
            **xpu_prompts([3], [[0]])
            | {"seqlen_q": torch.tensor([0, 4]), "query_start_loc": torch.tensor([0, 3])}
        )


@pytest.mark.parametrize("types", [Numbered, Strings])
def test_types_of_every_vintage(types):
    for name in filter(str.isupper, vars(types)):
        assert AttentionType.of(getattr(types, name)) is AttentionType[name]


def test_foreign_enums_are_taken_by_name_alone():
    class Other(enum.Enum):
        FIRST = "first"
        DECODER = "encoder"

    assert AttentionType.of(Other.DECODER) is AttentionType.DECODER
    with pytest.raises(InvalidInputError, match="attn_type must be one of"):
        AttentionType.of(Other.FIRST)


@pytest.mark.parametrize("kind", [Numbered.ENCODER, Strings.ENCODER])
@given(lens=LENGTHS)
def test_encoders_alone(values, kind, lens):
    """Counts of tokens that there are none of are None."""
    names = ("num_prefills", "num_prefill_tokens", "slot_mapping", "seq_lens", "seq_lens_tensor",
             "max_prefill_seq_len", "context_lens_tensor", "block_tables", "cross_slot_mapping",
             "cross_block_tables")  # fmt: skip
    meta = XFormersBackend.make_metadata(
        num_decode_tokens=0,
        max_decode_seq_len=0,
        use_cuda_graph=False,
        num_encoder_tokens=sum(lens),
        encoder_seq_lens=lens,
        encoder_seq_lens_tensor=torch.tensor(lens, dtype=torch.int),
        max_encoder_seq_len=max(lens),
        **dict.fromkeys(names),
    )
    layer = new_layer(4, 16, num_kv_heads=2)
    rows = [normal(i, sum(lens), heads, 16) for i, heads in enumerate((4, 2, 2))]
    empty = torch.tensor([], dtype=torch.float32)
    out = layer.forward(*rows, empty, meta, 1.0, 1.0, attn_type=kind)
    assert_close(out, dense(*rows, lens, lens, spec_of(layer, "encoder")), **TIGHT)
    assert meta.prefill_metadata is None
    with pytest.raises(InvalidInputError, match="num_prefills"):
        XFormersBackend.make_metadata(
            num_prefills=None, num_prefill_tokens=3, num_decode_tokens=0, seq_lens=[3]
        )


@given(lens=LENGTHS)
def test_encoder_only_models_without_slots(lens):
    """A CPU runner gives no table and no slot of a model that caches nothing."""
    nowhere = {"slot_mapping": torch.tensor([], dtype=torch.long)}
    fields = cpu_step(lens, lens, [range(9)] * len(lens), len(lens), False) | nowhere
    meta = TorchSDPABackend.make_metadata(**fields)
    layer = new_layer(4, 16, num_kv_heads=2, attn_type="encoder_only")
    rows = [normal(i, sum(lens), heads, 16) for i, heads in enumerate((4, 2, 2))]
    out = layer.forward(*rows, torch.tensor([]), meta)
    assert_close(out, dense(*rows, lens, lens, spec_of(layer, "encoder_only")), **TIGHT)


def cut_by_gpu(length, row, window):
    """ModelInputForGPUBuilder: as many whole blocks as the window needs, and the begun one."""
    blocks = -(-window // BLOCK) + (length % BLOCK > 0)
    return min(length, -(-window // BLOCK) * BLOCK + length % BLOCK), row[-blocks:]


def cut_by_cpu(length, row, window):
    """ModelInputForCPUBuilder: from the block of the first token that the window shows."""
    first = max(0, length - window) // BLOCK
    return length - first * BLOCK, row[first:]


@pytest.mark.parametrize("cut", [cut_by_gpu, cut_by_cpu])
@given(
    contexts=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    prefills=st.lists(PAIRS, max_size=2),
    window=st.integers(1, 13),
    seed=seeds(),
    alibi=st.booleans(),
)
def test_decodes_cut_to_their_window(values, cut, contexts, prefills, window, seed, alibi):
    """Lengths and tables are those of the window, `context_lens_tensor` of the whole sequence."""
    queries = [q for q, _ in prefills] + [1] * len(contexts)
    befores = [c for _, c in prefills] + contexts
    lens = [q + c for q, c in zip(queries, befores, strict=True)]
    slopes = (0.5, -0.25, 0.1, 1.0) if alibi else None
    spec = AttentionSpec(sliding_window=window, alibi_slopes=slopes)
    problem = random_problem(queries, lens, spec, block_size=BLOCK, seed=seed)
    rows, count = rows_of(problem), len(prefills)
    cuts = [cut(n, row, window) for n, row in zip(lens[count:], rows[count:], strict=True)]
    shown = lens[:count] + [n for n, _ in cuts]
    tokens = sum(queries[:count])
    fields = {
        "num_prefills": count,
        "slot_mapping": torch.tensor(slots_of(queries, lens, rows)),
        "num_prefill_tokens": tokens,
        "num_decode_tokens": len(contexts),
        "seq_lens": shown,
        "seq_lens_tensor": torch.tensor(shown, dtype=torch.int),
        "max_query_len": max(queries),
        "max_prefill_seq_len": max(lens[:count], default=0),
        "max_decode_seq_len": max(shown[count:]),
        "query_start_loc": torch.tensor(starts_of(queries), dtype=torch.int32),
        "seq_start_loc": torch.tensor(starts_of(shown), dtype=torch.int32),
        "context_lens_tensor": torch.tensor(befores, dtype=torch.int),
        "block_tables": padded(rows[:count] + [row for _, row in cuts]),
        "use_cuda_graph": False,
    }
    meta = check(problem, fields, backend=XFormersBackend)
    step = step_of(problem)
    decodes = layer_of(problem).forward(
        *(x[tokens:] for x in step[:3]), step.kv_cache, meta.decode_metadata
    )
    assert_close(decodes, reference(problem)[tokens:], **TIGHT)


@pytest.mark.usefixtures("on_cpu")
@given(lens=LENGTHS, window=st.sampled_from([4, 8]), seed=seeds())
def test_decodes_that_early_runners_cut_are_right_or_refused(lens, window, seed):
    """Some tables have lost blocks that the window shows: vLLM 0.5 to 0.6.3, and on XPUs to 0.8."""
    spec = AttentionSpec(sliding_window=window)
    problem = random_problem([1] * len(lens), lens, spec, block_size=BLOCK, seed=seed)
    rows = rows_of(problem)
    slots = torch.tensor(slots_of([1] * len(lens), lens, rows))
    cuts = [min(n, window) for n in lens]
    fields = cpu_decodes(cuts, [row[-(window // BLOCK) :] for row in rows])
    fields["slot_mapping"] = slots
    lost = any(n > window and n % BLOCK for n in lens)
    if lost:
        with pytest.raises(InvalidInputError, match="slot_mapping and block_tables must agree"):
            check(problem, fields)
    else:
        check(problem, fields)


def test_contexts_that_say_less_are_refused():
    with pytest.raises(InvalidInputError, match="context_lens"):
        XFormersBackend.make_metadata(
            num_prefills=0, num_prefill_tokens=0, num_decode_tokens=1, seq_lens=[9],
            context_lens_tensor=torch.tensor([7]), block_tables=torch.tensor([[0, 1, 2]]),
        )  # fmt: skip


@pytest.mark.parametrize("slopes", [None, [0.5, 0.25, 0.125, 1.0]])
@pytest.mark.parametrize("window", [None, 5])
def test_what_engines_read_of_a_layer(slopes, window):
    """Positionally as `Attention` makes it; its `extra_repr` prints these."""
    made = new_layer(4, 16, 0.3, 2, slopes, window, "auto", None, None)
    read = (made.num_heads, made.head_size, made.scale, made.num_kv_heads, made.sliding_window)
    assert read == (4, 16, 0.3, 2, window)
    assert (made.kv_cache_dtype, made.num_queries_per_kv) == ("auto", 2)
    assert made.need_mask is (slopes is not None or window is not None)
    assert made.logits_soft_cap is None
    if slopes is None:
        assert made.alibi_slopes is None
    else:
        torch.testing.assert_close(made.alibi_slopes, torch.tensor(slopes), rtol=0, atol=0)
    assert new_layer(4, 16).scale == 0.25
