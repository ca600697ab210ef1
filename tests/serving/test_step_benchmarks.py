"""The benchmarks of serving and of whole steps: what they measure and what they count."""

import json
import os

import jax
import numpy as np
import pytest
from benchmarks import serving as serving_benchmark
from benchmarks import whole_step
from benchmarks.models import SHAPES, random_params
from benchmarks.serving import Load, Seen
from benchmarks.whole_step import Needs, filled, needs_of_a_step
from pagedattn_serving.engine.generation import decode_loop
from tiny import TINY, tiny_params

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_a_whole_step_is_compared_with_reading_its_bytes(tmp_path, capsys):
    path = tmp_path / "step.json"
    sizes = [f"--size={name}={value}" for name, value in SIZES.items()]
    arguments = ["--shape=llama-8b", *sizes, "--cases=2x20", "--steps=2", f"--out={path}"]
    assert whole_step.main(arguments) == json.loads(path.read_text())
    assert json.loads(path.read_text())["machine"]["flags"] == os.environ.get("XLA_FLAGS", "")
    (row,) = json.loads(path.read_text())["cases"]
    assert row["case"] == "2x20"
    assert row["share"] == pytest.approx(row["ms_to_read"] / row["ms"])
    assert row["of_roofline"] > row["share"] * (1 - 1e-9) > 0
    assert row["tokens_s"] == pytest.approx(2e3 / row["ms"])
    assert "2x20" in capsys.readouterr().out


def test_the_bytes_of_a_step_are_those_of_the_products_and_the_cache():
    weights = 31 * 24 + 24 + 2 * (24 * (32 + 16 + 16 + 32) + 3 * 24 * 40 + 2 * 24)
    cached = 7 * 2 * 2 * 8 * 2  # tokens, keys and values, KV heads, head_dim, layers
    needs = needs_of_a_step(TINY, tiny_params(), [4, 3])
    assert needs == (4 * weights, 4 * cached, 2 * 2 * weights)
    assert needs.bytes == 4 * (weights + cached)


def test_the_roofline_is_the_slower_of_reading_and_computing():
    needs = Needs(weight_bytes=100, cache_bytes=50, operations=1000)
    assert needs.roofline(bytes_s=10, operations_s=1000) == 10 + 5
    assert needs.roofline(bytes_s=10, operations_s=50) == 20 + 5


def test_a_filled_cache_has_the_lengths_asked_for():
    state = filled(TINY, tiny_params(), [9, 20], new_tokens=5)
    assert state.pool.seq_lens.tolist() == [9, 20]
    assert state.lengths.tolist() == [10, 21]
    assert state.ends.tolist() == [15, 26]
    assert int(state.pool.num_free) == 0  # 1 + 2 blocks of 16, the new tokens' included
    for cache in state.caches:
        assert float(jax.numpy.std(cache.key)) == pytest.approx(1, abs=0.2)


def test_timed_steps_are_compiled_before(monkeypatch):
    median_of_runs = whole_step.median_of_runs

    def watched(run, state, runs):
        before = decode_loop._cache_size()
        result = median_of_runs(run, state, runs)
        assert decode_loop._cache_size() == before
        return result

    monkeypatch.setattr(whole_step, "median_of_runs", watched)
    assert whole_step.seconds_a_step(TINY, tiny_params(), [9, 20], 2, "xla", runs=2) > 0


def test_random_parameters_are_those_of_the_shape():
    shapes = jax.eval_shape(lambda: random_params(SHAPES["llama-8b"]))
    count = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes))
    assert count == 8_030_261_248  # as published
    assert {leaf.dtype.name for leaf in jax.tree.leaves(shapes)} == {"bfloat16"}


def test_the_engine_is_measured_beside_one_program(tmp_path):
    path = tmp_path / "serving.json"
    arguments = "--running 2 --longest 17 --rates 20 --seconds 0.2 --steps 2 --backend xla --out"
    serving_benchmark.main([*arguments.split(), str(path)])
    data = json.loads(path.read_text())
    (load,) = data["loads"]
    assert load["requests"] == 4
    assert 0 < load["running"] <= 2
    assert load["first_p99_ms"] >= load["first_p50_ms"] > 0
    full = data["full"]
    assert full["share"] == pytest.approx(full["engine_tokens_s"] / full["loop_tokens_s"])


def test_what_users_see_is_counted_from_when_they_asked():
    seen = Seen(asked={0: 1.0, 1: 2.0}, came={0: [1.5, 1.6, 1.8], 1: [5.0, 5.0]}, running=[1, 2])
    figures = seen.figures()
    assert figures["tokens_s"] == pytest.approx(5 / 4)
    assert figures["first_p50_ms"] == pytest.approx(1750)
    assert figures["between_p50_ms"] == pytest.approx(100)
    assert figures["running"] == 1.5


def test_arrivals_come_at_the_rate_in_mixed_lengths():
    load = Load(rate=50, seconds=20, shortest=3, longest=9, new_tokens=4)
    arrivals = load.arrivals(vocab_size=11, first_id=100)
    times, requests = zip(*arrivals, strict=True)
    assert len(times) == 1000
    assert times[-1] == pytest.approx(20, rel=0.15)
    assert {len(request.prompt) for request in requests} == set(range(3, 10))
    assert [request.id for request in requests] == list(range(100, 1100))
