"""Biases of a step's metadata: in place of the layers' own masks, for each type of attention."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import SPECS, mixed
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

from pagedattn import AttentionSpec, InvalidInputError
from pagedattn.testing import assert_attention_close, random_problem
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
    assert step.attn_metadata.get_attn_bias("decoder") is biases
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
    "biases", [[torch.zeros(3, 3)], [torch.zeros(3, 3), torch.zeros(1, 8)], [None, None],
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


@pytest.mark.parametrize("state", STATES)
def test_what_torch_keeps_for_a_thread_changes_nothing(state):
    """Numbers that bfloat16 would round."""
    problem = random_problem([6, 1], [9, 30], AttentionSpec(causal=False), arrays=["bias"])
    layer, step = new_layer(**SIZES), step_of(problem)
    step.attn_metadata.set_attn_bias([50 + bias for bias in lists_of(problem)], "decoder")
    with STATES[state]():
        out = layer.forward(*step)
    assert_attention_close(out, None, problem)
