"""The example model and its serving, on tiny random models."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import quantised_cache
from pagedattn_serving.checkpoint.folder import (
    SHIPPED,
    load_checkpoint,
    read_config,
    save_checkpoint,
)
from pagedattn_serving.demo.occupancy import (
    CACHED,
    FREE,
    blocks_padded,
    blocks_used,
    draw_occupancy,
)
from pagedattn_serving.demo.parity import dense_scores, greedy, largest_difference
from pagedattn_serving.engine import next_logits as next_logits_module
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.families.forward import forward_dense, forward_paged
from pagedattn_serving.families.mistral import Mistral
from pagedattn_serving.training.corpus import END_OF_TOPIC, add_noise, split_topics, windows_at
from pagedattn_serving.training.initial import init_params
from safetensors.numpy import load_file
from tiny import LIMITS, QUICK, TINY, greedy_completions, serve, tiny_params, tiny_requests

from pagedattn import InvalidInputError, available_backends, init_kv_cache, make_batch

pytestmark = pytest.mark.usefixtures("exact_products")
WINDOWED = Mistral(**vars(TINY), layer_types=("sliding_attention",) * TINY.num_hidden_layers)


@pytest.fixture(params=["xla", "sdpa"])
def backend(request) -> str:
    if request.param not in available_backends():
        pytest.skip(f"{request.param} is not installed")
    return request.param


@pytest.fixture
def params() -> dict:
    return tiny_params()


@pytest.mark.parametrize("tied", [True, False])
def test_checkpoint_round_trip(tmp_path, tied):
    config = replace(WINDOWED, tie_word_embeddings=tied, eos_token_id=(1, 2), sliding_window=5)
    params = init_params(config, jax.random.key(1))
    save_checkpoint(tmp_path, config, params)
    loaded_config, loaded = load_checkpoint(tmp_path)
    assert loaded_config == config
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    jax.tree.map(np.testing.assert_array_equal, loaded, rounded)


def test_checkpoint_has_hugging_face_names_and_layouts(tmp_path, params):
    save_checkpoint(tmp_path, TINY, params, dtype=jnp.float32)
    shapes = {
        name: array.shape for name, array in load_file(tmp_path / "model.safetensors").items()
    }
    assert shapes["model.embed_tokens.weight"] == (31, 24)
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (16, 24)
    assert shapes["model.layers.0.mlp.down_proj.weight"] == (24, 40)
    assert shapes["lm_head.weight"] == (31, 24)
    assert len(shapes) == 3 + 2 * 9


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "fields"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "RoPE"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps to be float, got '1e-6'"),
        ({"hidden_size": 24.0}, "hidden_size to be int"),
        ({"vocab_size": True}, "vocab_size"),
        ({"eos_token_id": [1, "</s>"]}, "eos_token_id"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor to be float"),
    ],
)
def test_config_of_another_model_is_rejected(tmp_path, params, change, message):
    save_checkpoint(tmp_path, TINY, params)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        read_config(path)


def test_config_defaults_are_hugging_faces(tmp_path):
    path = tmp_path / "config.json"
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    raw = {name: getattr(TINY, name) for name in (*names, "num_attention_heads")}
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    positions = {"max_position_embeddings": 64, "model_type": "llama"}
    path.write_text(json.dumps(raw | positions | theta))
    config = read_config(path)
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 6, 5e5)
    assert not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("chunks", "window"), [((21,), None), ((13, 1, 1, 6), None), ((13, 1, 1, 6), 6)]
)
def test_paged_forward_equals_dense_however_chunked(params, backend, chunks, window):
    config, blocks = replace(WINDOWED, sliding_window=window), [5, 0, 3, 6, 1, 4]
    tokens = jax.random.randint(jax.random.key(2), (21,), 0, config.vocab_size)
    caches = [init_kv_cache(7, 4, 2, 8, dtype=jnp.float32) for _ in range(2)]
    hidden, start = [], 0
    for length in chunks:
        batch = make_batch([length], [start], [blocks], block_size=4)
        chunk = tokens[start : start + length]
        out, caches = forward_paged(params, config, chunk, caches, batch, backend)
        hidden.append(out)
        start += length
    expected = forward_dense(params, config, tokens)
    scale = float(jnp.abs(expected).max())
    np.testing.assert_allclose(jnp.concatenate(hidden), expected, atol=1e-5 * scale)


def test_serving_is_greedy_and_equals_dense(params, backend):
    engine, requests = Engine(params, TINY, LIMITS, backend), tiny_requests()
    steps = serve(engine, requests)
    completions = greedy_completions(engine)
    expected = dense_scores(params, TINY, requests, completions)
    assert completions == greedy(expected)
    assert [len(completions[r.id]) for r in requests] == [r.max_new_tokens for r in requests]
    scores = {
        r.id: np.concatenate([step.scores[r.id] for step in steps if r.id in step.scores])
        for r in requests
    }
    assert largest_difference(scores, expected) < 1e-3


def test_two_programs_serve_everything(params, monkeypatch):
    traced = []

    def counting(params, model, tokens, *rest):
        traced.append(tokens.shape)
        return forward_paged(params, model, tokens, *rest)

    monkeypatch.setattr(next_logits_module, "forward_paged", counting)
    limits = replace(LIMITS, token_budget=13)  # a shape that no other test has compiled
    serve(Engine(params, replace(TINY, rope_theta=9999.0), limits, QUICK), tiny_requests())
    assert sorted(traced) == [(4,), (13,)]


def test_stop_token_ends_a_completion(params):
    requests = tiny_requests()[:1]
    free_running = Engine(params, TINY, LIMITS, QUICK)
    serve(free_running, requests)
    (completion,) = free_running.completions[0]
    stop = completion[2]
    stopping = Engine(params, replace(TINY, eos_token_id=stop), LIMITS, QUICK)
    serve(stopping, requests)
    assert stopping.completions[0] == [completion[: completion.index(stop) + 1]]


def test_limits_beyond_the_model_are_refused(params):
    with pytest.raises(ValueError, match="64 positions"):
        Engine(params, TINY, replace(LIMITS, max_seq_len=65))


def test_picture_of_occupancy(tmp_path):
    owners = np.array([[0, FREE, 3], [0, 0, 3], [FREE, CACHED, 3]])
    assert blocks_used(owners).tolist() == [2, 3, 1]
    assert blocks_padded(owners, longest=5).tolist() == [10, 10, 5]
    draw_occupancy(owners, 5, tmp_path / "pool.png")
    assert (tmp_path / "pool.png").read_bytes().startswith(b"\x89PNG")


def test_training_text_is_split_without_overlap():
    training, validation = (bytes(np.asarray(text)).decode() for text in split_topics())
    topics = set(training.split(chr(END_OF_TOPIC)))
    paragraphs = {paragraph for topic in topics for paragraph in topic.split("\n\n")}
    held_out = validation.replace(chr(END_OF_TOPIC), "\n\n").split("\n\n")
    assert len(validation) > 10_000
    assert not paragraphs & {paragraph for paragraph in held_out if paragraph}


def test_training_windows_and_noise():
    text = jnp.arange(1000, dtype=jnp.uint8)
    inputs, targets = windows_at(text, jnp.array([0, 7]), length=200)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(add_noise(inputs, jax.random.key(0), 0.0), inputs)
    changed = (add_noise(inputs, jax.random.key(0), 0.5) != inputs).mean()
    assert 0.4 < changed < 0.6


def test_shipped_checkpoint_is_small_and_loads():
    config, params = load_checkpoint(SHIPPED)
    assert (SHIPPED / "model.safetensors").stat().st_size <= 8e6
    assert config.vocab_size == 256
    assert 1e6 < sum(leaf.size for leaf in jax.tree.leaves(params)) < 4e6


def test_a_folder_without_a_model_says_what_belongs_there(tmp_path):
    with pytest.raises(InvalidInputError, match="hf download") as error:
        load_checkpoint(tmp_path / "nowhere")
    assert str(tmp_path / "nowhere" / "config.json") in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_a_checkpoint_lacks_is_named(tmp_path, params, name):
    save_checkpoint(tmp_path, TINY, params)
    (tmp_path / name).unlink()
    with pytest.raises(InvalidInputError, match=name):
        load_checkpoint(tmp_path)


def test_quantised_caches_cost_the_model_little(monkeypatch):
    """On two windows of text: int8 the least, float8_e5m2, with two bits of fraction, more."""
    monkeypatch.setattr(quantised_cache, "WINDOWS", 2)
    costs = dict(quantised_cache.main())
    assert 0.97 < costs["float32"][0] < 1  # what bfloat16 costs by itself
    for scales in ("head", "token"):
        names = (f"{dtype}, {scales}" for dtype in ("int8", "float8_e4m3fn", "float8_e5m2"))
        int8, e4m3, e5m2 = (costs[name][0] for name in names)
        assert int8 > e4m3 > e5m2 > 0.8
        assert int8 > 0.95
    assert costs["int4, token"][0] > 0.75
    assert all(abs(loss) < 0.05 for _, loss, _ in costs.values())
    assert costs["int4, token"][2] < 5 < 8 <= costs["int8, head"][2]
