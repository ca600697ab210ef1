"""An engine's calls around a step: the state of captured graphs, layers and outputs it passes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch_layers import assert_close, assert_same, layer_of, reference, step_of

from pagedattn import AttentionSpec, InvalidInputError
from pagedattn.testing import random_problem
from pagedattn_torch import AttentionMetadata, IpexAttnBackend, TorchSDPABackend, XFormersBackend

BACKENDS = [TorchSDPABackend, XFormersBackend, IpexAttnBackend]
TIGHT = {"atol": 1e-5, "rtol": 1e-5}
GRAPH, COLUMNS = 4, 6
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def runner_of(backend=TorchSDPABackend, device=DEVICE):
    return SimpleNamespace(
        device=torch.device(device),
        attn_backend=backend,
        graph_block_tables=np.zeros((8, COLUMNS), np.int32),
        max_seq_len_to_capture=COLUMNS * 4,
        get_max_block_per_batch=lambda: COLUMNS,
    )


def decodes(lens, seed=0):
    """A step of two decodes, padded to the graph as a model runner does it."""
    problem = random_problem([1, 1], lens, AttentionSpec(), num_blocks=16, seed=seed)
    query, key, value, kv_cache, meta = step_of(problem)
    tables = torch.zeros(GRAPH, COLUMNS, dtype=torch.int32)
    tables[:2, : meta.block_tables.shape[1]] = meta.block_tables
    padded = AttentionMetadata(
        num_prefills=0,
        num_prefill_tokens=0,
        num_decode_tokens=GRAPH,
        slot_mapping=torch.tensor([*meta.slot_mapping.tolist(), -1, -1]).to(DEVICE),
        seq_lens=[*lens, 1, 1],
        seq_lens_tensor=torch.tensor([*lens, 1, 1], dtype=torch.int32).to(DEVICE),
        query_start_loc=torch.tensor([0, 1, 2]).to(DEVICE),
        context_lens_tensor=torch.tensor([n - 1 for n in lens]).to(DEVICE),
        block_tables=tables.to(DEVICE),
        use_cuda_graph=True,
    )
    rows = (torch.cat([x, x]).to(DEVICE) for x in (query, key, value))
    return problem, (*rows, kv_cache.to(DEVICE)), padded


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_has_a_state(backend):
    state = backend.get_state_cls()(runner_of(backend, "cpu"))
    assert backend.accept_output_buffer is False
    state.begin_forward(None)
    with state.graph_capture(8):
        meta = state.graph_capture_get_metadata_for_batch(3)
        assert isinstance(state.graph_clone(3), backend.get_state_cls())
    assert type(meta) is backend.get_metadata_cls()
    assert meta.slot_mapping.tolist() == [-1] * 3
    assert meta.seq_lens_tensor.tolist() == [1] * 3
    assert (meta.num_decode_tokens, meta.max_query_len, meta.use_cuda_graph) == (3, 1, True)


def test_buffers_are_what_the_metadata_reads():
    state = TorchSDPABackend.get_state_cls()(runner_of())
    with state.graph_capture(8):
        meta = state.graph_capture_get_metadata_for_batch(GRAPH)
        buffers = state.get_graph_input_buffers(meta)
        _, _, step = decodes([9, 5])
        state.prepare_graph_input_buffers(buffers, step)
        for name in ("slot_mapping", "seq_lens_tensor", "block_tables"):
            assert buffers[name].data_ptr() == getattr(meta, name).data_ptr()
            assert getattr(meta, name).tolist() == getattr(step, name).tolist()


def captured(call):
    """A call to be made again: on CUDA a graph, elsewhere itself."""
    if DEVICE == "cpu":
        return call, lambda: None
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph, result = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        result.append(call())
    return lambda: result[0], graph.replay


def test_steps_are_replayed_through_the_buffers():
    state = TorchSDPABackend.get_state_cls()(runner_of())
    problem, rows, _ = decodes([1, 1])
    layer, inputs = layer_of(problem), [x.clone() for x in rows]
    with state.graph_capture(8):
        meta = state.graph_capture_get_metadata_for_batch(GRAPH)
        buffers = state.get_graph_input_buffers(meta)
        result, replay = captured(lambda: layer.forward(*inputs, meta))
        for lens, seed in (([9, 5], 1), ([20, 3], 2), ([4, 24], 3)):
            problem, rows, step = decodes(lens, seed)
            for held, new in zip(inputs, rows, strict=True):
                held.copy_(new)
            state.prepare_graph_input_buffers(buffers, step)
            replay()
            assert_close(result()[:2], reference(problem), **TIGHT)


def test_buffers_of_encoder_decoders():
    state = XFormersBackend.get_state_cls()(runner_of())
    with state.graph_capture(8):
        meta = state.graph_capture_get_metadata_for_batch(2, is_encoder_decoder_model=True)
        buffers = state.get_graph_input_buffers(meta, is_encoder_decoder_model=True)
        assert meta.is_all_cross_attn_metadata_set
        step = state.graph_capture_get_metadata_for_batch(2, is_encoder_decoder_model=True)
        step.encoder_seq_lens_tensor = torch.tensor([7, 3], dtype=torch.int32).to(DEVICE)
        state.prepare_graph_input_buffers(buffers, step, is_encoder_decoder_model=True)
    assert meta.encoder_seq_lens_tensor.tolist() == [7, 3]
    assert meta.num_encoder_tokens == 0


def test_errors_of_capture():
    state = TorchSDPABackend.get_state_cls()(runner_of())
    for call in (state.graph_clone, state.graph_capture_get_metadata_for_batch):
        with pytest.raises(InvalidInputError, match="capture"):
            call(1)
    with state.graph_capture(4):
        with pytest.raises(InvalidInputError, match="batch_size"):
            state.graph_capture_get_metadata_for_batch(5)
        buffers = state.get_graph_input_buffers(state.graph_capture_get_metadata_for_batch(2))
        before = buffers["slot_mapping"].clone()
        with pytest.raises(InvalidInputError, match="slot_mapping must be padded"):
            state.prepare_graph_input_buffers(buffers, decodes([9, 5])[2])
        assert torch.equal(buffers["slot_mapping"], before)


class Scaled:
    """What a later engine's layer has, where it is no module."""

    _k_scale = _v_scale = torch.tensor(0.5)


@pytest.mark.parametrize("layer", [torch.nn.Linear(1, 1), Scaled()])
@pytest.mark.parametrize("named", [False, True])
def test_a_layer_is_taken_and_not_used(layer, named):
    problem = random_problem([3, 1], [7, 9], AttentionSpec())
    step, ours = step_of(problem), layer_of(problem)
    out = ours.forward(layer=layer, **step._asdict()) if named else ours.forward(layer, *step)
    assert_same(out, ours.forward(*step_of(problem)))


def test_a_layer_and_an_output_by_position():
    problem = random_problem([3, 1], [7, 9], AttentionSpec())
    step = step_of(problem)
    output = step.query.new_empty(4, 64)
    layer_of(problem).forward(Scaled(), *step, output)
    assert_close(output, reference(problem), **TIGHT)


@pytest.mark.parametrize("flat", [False, True])
def test_an_output_is_filled(flat):
    problem = random_problem([3, 1], [7, 9], AttentionSpec())
    step, ours = step_of(problem), layer_of(problem)
    query = step.query.flatten(1) if flat else step.query
    output = torch.full_like(step.query, torch.nan)
    out = ours.forward(query, *step[1:], output=output)
    assert out is output
    assert_same(out, ours.forward(*step_of(problem)))


BAD_OUTPUTS = {
    "a list": [1.0],
    "another dtype": torch.zeros(4, 4, 16, dtype=torch.float64),
    "too small": torch.zeros(3, 4, 16),
    "of other tokens": torch.zeros(2, 8, 16),
    "gradients": torch.zeros(4, 4, 16, requires_grad=True),
}


@pytest.mark.parametrize("name", BAD_OUTPUTS)
def test_bad_outputs_leave_the_cache(name):
    problem = random_problem([3, 1], [7, 9], AttentionSpec())
    step = step_of(problem)
    before = step.kv_cache.clone()
    with pytest.raises((InvalidInputError, NotImplementedError)):
        layer_of(problem).forward(*step, output=BAD_OUTPUTS[name])
    assert_same(step.kv_cache, before)
