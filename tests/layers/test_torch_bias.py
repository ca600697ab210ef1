"""Biases of a step's metadata: in place of the layers' own masks, for each type of attention."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import SPECS, mixed
from hypothesis import given
from hypothesis import strategies as st
from test_torch_states import STATES
from torch_layers import (
    assert_close,
    dense,
    hide_values,
    layer_of,
    new_layer,
    normal,
    spec_of,
    step_of,
)

from pagedattn import AttentionSpec, InvalidInputError, attention_bias
from pagedattn.testing import assert_attention_close, random_problem
from pagedattn.testing.strategies import seeds
from pagedattn_torch import AttentionMetadata

SIZES = {"num_heads": 4, "head_size": 16, "num_kv_heads": 2}
TIGHT = {"atol": 2e-6, "rtol": 1e-5}


def lists_of(problem):
    """The bias of a problem, as a tensor for each sequence."""
    lens = zip(problem.query_start_loc, problem.query_lens, problem.seq_lens, strict=False)
    rows = [problem.bias[start : start + n, :, :keys] for start, n, keys in lens]
    return [torch.from_numpy(x).transpose(0, 1) for x in rows]


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("lens", [([6, 7, 1, 0, 4], [6, 19, 22, 9, 5]), ([1, 1], [9, 30])])
def test_of_prompts_chunks_and_decodes(monkeypatch, lens, hidden):
    """Windows, ALiBi and causality give way; fresh keys and cached ones are biased alike."""
    problem = random_problem(*lens, AttentionSpec(causal=False), arrays=["bias"])
    layer = new_layer(**SIZES, sliding_window=3, alibi_slopes=(1.0, 2.0, 3.0, 4.0))
    step = step_of(problem)
    if hidden:
        hide_values(monkeypatch)
    step.attn_metadata.set_attn_bias(lists_of(problem), "decoder")
    assert_attention_close(layer.forward(*step), None, problem)


@pytest.mark.usefixtures("on_cpu")
def test_what_is_got_can_be_set():
    problem = mixed(SPECS["all"], pad_tokens=None)
    layer, step = layer_of(problem), step_of(problem)
    biases = step.attn_metadata.get_attn_bias("decoder", layer.specs["decoder"])
    step.attn_metadata.set_attn_bias(biases, "decoder")
    got = step.attn_metadata.get_attn_bias("decoder")
    assert [*map(id, got)] == [*map(id, biases)]
    assert_attention_close(layer.forward(*step), None, problem)
    step.attn_metadata.set_attn_bias(None, "decoder")
    assert_attention_close(layer.forward(*step), None, problem)


@pytest.mark.parametrize("kind", ["encoder", "encoder_only", "encoder_decoder"])
def test_of_encoders_and_across(kind):
    """Only the field of the type counts."""
    query_lens, key_lens = [5, 3], [5, 3] if kind != "encoder_decoder" else [4, 6]
    fields = {"seq_lens": query_lens, "encoder_seq_lens": key_lens}
    meta = AttentionMetadata(
        num_prefills=2, num_prefill_tokens=8, num_decode_tokens=0, num_encoder_tokens=sum(key_lens),
        **fields,
    )  # fmt: skip
    query, key, value = normal(0, 8, 4, 16), *normal(1, 2, sum(key_lens), 2, 16)
    biases = [normal(i, 4, q, k) for i, (q, k) in enumerate(zip(query_lens, key_lens, strict=True))]
    other = "encoder" if kind != "encoder" else "decoder"
    meta.set_attn_bias(biases, kind)
    meta.set_attn_bias([torch.full_like(b[0], -torch.inf) for b in biases], other)
    layer = new_layer(**SIZES, attn_type=kind)
    got = layer.forward(query, key, value, None, meta)
    packed = np.full((8, 4, 6), np.nan)
    for start, bias in zip((0, 5), biases, strict=True):
        rows = bias.transpose(0, 1)
        packed[start : start + len(rows), :, : rows.shape[2]] = rows
    want = dense(query, key, value, query_lens, key_lens, spec_of(layer, kind), bias=packed)
    assert_close(got, want, **TIGHT)


def test_parts_of_the_metadata_have_theirs():
    problem = random_problem([3, 1], [3, 9], AttentionSpec(causal=False), arrays=["bias"])
    meta = step_of(problem).attn_metadata
    biases = lists_of(problem)
    meta.attn_bias = biases
    assert meta.prefill_metadata.attn_bias == biases[:1]
    assert meta.decode_metadata.attn_bias == biases[1:]


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(
    "biases", [[torch.zeros(3, 4)], [torch.zeros(3, 3), torch.zeros(1, 8)], [None] * 3, [3],
               [torch.zeros(3, 3).int()] * 2, [torch.zeros(3, 3, 3)] * 2, 3, object(),
               torch.tensor(3.0), torch.zeros(3, 3)],
)  # fmt: skip
def test_wrong_ones_are_refused_before_the_write(biases):
    problem = random_problem([3, 1], [3, 9], AttentionSpec())
    layer, step = layer_of(problem), step_of(problem)
    before = step.kv_cache.clone()
    step.attn_metadata.set_attn_bias(biases, "decoder")
    with pytest.raises(InvalidInputError, match="attn_bias must be"):
        layer.forward(*step)
    torch.testing.assert_close(step.kv_cache, before, rtol=0, atol=0, equal_nan=True)


def masks_of(form, lens, spec):
    """The seeds' own biases of prompts: those of SDPA and IPEX, and xFormers' masks."""
    slopes = torch.tensor(spec.alibi_slopes or [0.0])
    if form == "xformers, alibi":
        masks = pytest.importorskip("xformers.ops.fmha.attn_bias")
        return [
            masks.LowerTriangularMaskWithTensorBias(
                -torch.tril(distances(n)).abs() * slopes[:, None, None].view(1, 2, 2, 1, 1)
            )
            for n in lens
        ]
    if form == "xformers":
        masks = pytest.importorskip("xformers.ops.fmha.attn_bias")
        mask = masks.BlockDiagonalCausalMask.from_seqlens(lens, device=torch.device("cpu"))
        return [mask.make_local_attention(spec.sliding_window)]
    seen = [attention_bias(np.arange(n), np.arange(n), spec) for n in lens]
    biases = [torch.tensor(bias)[None] for bias in seen]
    return [bias == 0 for bias in biases] if form == "bool" else biases


def distances(n):
    return torch.arange(n, dtype=torch.float32)[:, None] - torch.arange(n)


FORMS = {
    "[1, H, S, S]": AttentionSpec(alibi_slopes=(0.5, 0.25, 0.1, 1.0)),
    "[1, S, S]": AttentionSpec(sliding_window=3),
    "bool": AttentionSpec(sliding_window=3),
    "xformers": AttentionSpec(sliding_window=3),
    "xformers, alibi": AttentionSpec(alibi_slopes=(0.5, 0.25, 0.1, 1.0)),
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("form", FORMS)
@given(
    prompts=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    decodes=st.lists(st.integers(0, 9), max_size=2),
    hidden=st.booleans(),
    seed=seeds(),
)
def test_the_seeds_own_forms_of_the_prompts_alone(form, prompts, decodes, hidden, seed):
    """A layer without a mask of its own gets one; decodes keep the layer's."""
    queries = prompts + [1] * len(decodes)
    lens = prompts + [n + 1 for n in decodes]
    problem = random_problem(queries, lens, FORMS[form], seed=seed)
    step = step_of(problem, num_prefills=len(prompts), num_prefill_tokens=sum(prompts))
    step.attn_metadata.seq_lens = lens  # as engines do: bounds are known on the host
    step.attn_metadata.set_attn_bias(masks_of(form, prompts, FORMS[form]), "decoder")
    with pytest.MonkeyPatch.context() as patch:
        if hidden and form != "xformers, alibi":
            hide_values(patch)
        assert_attention_close(layer_of(problem).forward(*step), None, problem)
    if not decodes:
        step = step_of(problem)._replace(attn_metadata=step.attn_metadata)
        assert_attention_close(new_layer(**SIZES).forward(*step), None, problem)


@pytest.mark.usefixtures("on_cpu")
@given(data=st.data(), kind=st.sampled_from(["decoder", "encoder", "encoder_decoder"]))
def test_none_leaves_a_sequence_to_the_layer(data, kind):
    """Whichever sequences have one; the seeds set a list of None where there is nothing to mask."""
    queries = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    keys = queries if kind != "encoder_decoder" else [n + 2 for n in queries]
    meta = AttentionMetadata(
        num_prefills=len(queries), num_prefill_tokens=sum(queries), num_decode_tokens=0,
        seq_lens=queries, encoder_seq_lens=keys,
    )  # fmt: skip
    layer = new_layer(**SIZES, sliding_window=2, attn_type=kind)
    rows = normal(0, sum(queries), 4, 16), *normal(1, 2, sum(keys), 2, 16)
    biases = [torch.zeros(q, k) if data.draw(st.booleans()) else None
              for q, k in zip(queries, keys, strict=True)]  # fmt: skip
    meta.set_attn_bias(biases, kind)
    spec, want = spec_of(layer, kind), []
    for other in (spec, AttentionSpec(causal=False)):
        want.append(dense(*rows, queries, keys, other))
    biased = np.repeat([bias is not None for bias in biases], queries)
    want = np.where(biased[:, None, None], want[1], want[0])
    assert_close(layer.forward(*rows, None, meta), want, **TIGHT)


@pytest.mark.parametrize("state", STATES)
def test_what_torch_keeps_for_a_thread_changes_nothing(state):
    """Numbers that bfloat16 would round."""
    problem = random_problem([6, 1], [9, 30], AttentionSpec(causal=False), arrays=["bias"])
    layer, step = new_layer(**SIZES), step_of(problem)
    step.attn_metadata.set_attn_bias([50 + bias for bias in lists_of(problem)], "decoder")
    with STATES[state]():
        out = layer.forward(*step)
    assert_attention_close(out, None, problem)
