"""Calls that are kept: the file describes the call, and a replay judges every backend by it."""

import contextlib
import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensors import interleaved, tensors

from pagedattn import AttentionSpec, InvalidInputError, UnsupportedError
from pagedattn.__main__ import main
from pagedattn._dispatch import registry, select
from pagedattn._dispatch.call import call_of
from pagedattn.report import replay
from pagedattn.testing import (
    assert_attention_close,
    attend,
    batch_of,
    cache_of,
    expect,
    random_problem,
    read_record,
    record,
)
from pagedattn.testing.strategies import BUCKETS, OPTIONS, options_table, problems, seeds

pytestmark = pytest.mark.usefixtures("on_cpu")


@pytest.fixture
def file(tmp_path):
    return tmp_path / "call.json"


def arrays_of(problem):
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec


def keep(file, problem, **options):
    record(file, *arrays_of(problem), **options, **problem.arrays)


def facts(problem, **options):
    """All that is known of a call before its values, and its lengths."""
    call = call_of(*arrays_of(problem), **options, **problem.arrays)
    return call, list(problem.query_lens), list(problem.seq_lens)


@given(st.data(), seeds())
@pytest.mark.parametrize("name", OPTIONS)
def test_a_replay_is_of_the_same_call(file, name, data, seed):
    bucket = data.draw(st.sampled_from(BUCKETS))
    options = options_table(bucket.num_heads)[name]
    given_options = {"spec": options.spec, "arrays": options.arrays, "cache": options.cache}
    cross = not options.spec.causal and data.draw(st.booleans())
    problem = data.draw(problems(bucket=bucket, cross=cross, **given_options))
    flags = {"return_lse": data.draw(st.booleans()), "batch_invariant": data.draw(st.booleans())}
    keep(file, problem, backend="xla", **flags)
    kept = read_record(file, seed=seed)
    assert facts(kept.problem, **flags) == facts(problem, **flags)
    assert (kept.framework, kept.backend) == ("jax", "xla")
    assert {flag: getattr(kept, flag) for flag in flags} == flags


@given(st.data())
def test_values_are_kept_bit_for_bit_when_asked_for(file, data):
    problem = data.draw(problems())
    keep(file, problem, values=True)
    kept = read_record(file).problem
    assert np.array_equal(kept.block_tables, batch_of(problem).block_tables)
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if isinstance(value, np.ndarray) and field.name != "block_tables":
            assert getattr(kept, field.name).tobytes() == value.tobytes()


@pytest.mark.parametrize("wide", ["float64", "int64"])
def test_values_of_64_bits_are_kept(file, wide):
    """Torch's own dtype of indices, and one that JAX has only when asked."""
    torch = pytest.importorskip("torch")
    problem = random_problem([1, 2], [9, 5], AttentionSpec(), arrays=["selection"])
    query, cache, batch, spec = arrays_of(problem)
    arrays = query, cache, problem.arrays["selection"]
    query, cache, selection = tensors(jax.tree.map(jnp.asarray, arrays))
    if wide == "int64":
        selection = jax.tree.map(torch.Tensor.long, selection)
    else:
        query, cache = jax.tree.map(lambda rows: rows.double() / 3, (query, cache))
    record(file, query, cache, batch, spec, values=True, selection=selection)
    kept = read_record(file).problem
    held = kept.selection if wide == "int64" else kept.query
    given = selection.blocks if wide == "int64" else query
    assert held.dtype == wide
    np.testing.assert_array_equal(held, given.numpy())


def test_no_values_are_kept_unasked(file):
    problem = random_problem([3], [9], AttentionSpec())
    keep(file, problem)
    told = json.loads(file.read_text())
    assert "block_tables" not in told["batch"]
    assert {key for about in told["arrays"].values() for key in about} == {"shape", "dtype"}
    assert told["explain"]["choice"]
    assert told["versions"]["pagedattn"]
    assert told["machine"]["devices"]


@given(seeds())
def test_random_values_give_what_the_oracle_says(file, seed):
    """What a replay draws is a proper problem: NaN reaches no result."""
    spec = AttentionSpec(sliding_window=9)
    problem = random_problem([3, 0, 1], [9, 5, 17], spec, arrays=("sinks", "bias"), pad_tokens=6)
    keep(file, problem)
    drawn = read_record(file, seed=seed).problem
    assert np.isnan(drawn.key_cache).any()
    assert_attention_close(*attend(drawn, backend="xla"), drawn)


def test_blocks_that_sequences_share_are_enough(file):
    """Of a cache that could not hold the sequences apart."""
    tables = [[0, 1, 2], [0, 1, 3]]
    problem = random_problem([1, 1], [9, 10], AttentionSpec(), num_blocks=4, block_tables=tables)
    keep(file, problem)
    drawn = read_record(file).problem
    assert_attention_close(*attend(drawn, backend="xla"), drawn)


def test_a_tensors_strides_are_kept(file):
    problem = random_problem([3], [9], AttentionSpec())
    cache = interleaved(tensors(cache_of(problem)))
    call = tensors(jnp.asarray(problem.query)), cache, batch_of(problem)
    record(file, *call, values=True, return_lse=True)
    kept = read_record(file)
    assert kept.framework == "torch"
    assert kept.strides == {"key": cache.key.stride(), "value": cache.value.stride()}
    assert np.array_equal(kept.problem.key_cache, problem.key_cache, equal_nan=True)
    rows = {row["backend"]: row["result"] for row in replay.replay(file)["rows"]}
    assert rows["sdpa"] == "right"


def test_traced_calls(file):
    """Where the lengths are known; else the error says what to do."""
    problem = random_problem([3], [9], AttentionSpec())
    query, cache, batch, spec = arrays_of(problem)

    def step(query, cache, batch=batch, values=False):
        record(file, query, cache, batch, spec, values=values)
        return query

    jax.jit(step)(query, cache)
    assert facts(read_record(file).problem) == facts(problem)
    with pytest.raises(InvalidInputError, match=r"seq_lens|query_start_loc.*outside jit"):
        jax.jit(step)(query, cache, batch)
    with pytest.raises(InvalidInputError, match="must know query"):
        jax.jit(lambda query: step(query, cache, values=True))(query)


def test_what_is_no_call_is_not_kept(file):
    problem = random_problem([3], [9], AttentionSpec())
    query, *rest = arrays_of(problem)
    with pytest.raises(InvalidInputError, match="num_heads"):
        record(file, query[:, :3], *rest)
    with pytest.raises(TypeError, match="nonsense"):
        record(file, query, *rest, nonsense=query)
    assert not file.exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 0}', "\xff"])
def test_other_files_are_refused(file, text):
    file.write_text(text)
    with pytest.raises(InvalidInputError, match=r"must be (JSON|a call of format 1)"):
        read_record(file)


def places(tree, path=()):
    """The path of every value of a JSON tree."""
    yield path
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from places(value, (*path, key))


@given(st.data())
def test_changed_files_raise_the_librarys_error(file, data):
    """Whatever one changes, it is still a call, or refused."""
    problem = random_problem([3, 1], [9, 4], AttentionSpec(), arrays=("sinks",))
    keep(file, problem, values=data.draw(st.booleans()))
    told = json.loads(file.read_text())
    parts = ("spec", "batch", "cache", "arrays", "options", "framework")
    path = data.draw(st.sampled_from([p for p in places(told) if p and p[0] in parts]))
    *above, last = path
    place = told
    for key in above:
        place = place[key]
    if data.draw(st.booleans()):
        del place[last]
    else:
        place[last] = data.draw(st.sampled_from([None, -1, 0, 3, 2.5, "x", [], {}, True, [1, 2]]))
    file.write_text(json.dumps(told))
    with contextlib.suppress(InvalidInputError):
        attend(read_record(file).problem, backend="xla")


@given(st.data(), st.integers(1, 9))
def test_the_last_queries_are_a_problem_of_their_own(data, most):
    """With the results that they have among the others."""
    problem = data.draw(problems())
    fewer, rows = replay.last_queries(problem, most)
    assert max(fewer.query_lens, default=0) <= most or problem.parents is not None
    whole, part = expect(problem), expect(fewer)
    np.testing.assert_allclose(part.out, whole.out[rows], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(part.lse, whole.lse[rows], rtol=1e-12)


def rows_of(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["pagedattn", *map(str, arguments)])
    status = main()
    return status, capsys.readouterr()


def test_the_command_replays(file, monkeypatch, capsys):
    keep(file, random_problem([3], [9], AttentionSpec(), head_dim=64, dtype="bfloat16"))
    status, printed = rows_of(monkeypatch, capsys, "--replay", file, "--json")
    rows = {row.pop("backend"): row for row in json.loads(printed.out)["rows"]}
    assert status == 0
    assert rows["xla"]["result"] == "right"
    assert rows["xla"]["microseconds"] > 0
    assert "runs on cuda" in rows["mosaic"]["result"]
    assert rows["mosaic"]["microseconds"] is None
    status, printed = rows_of(monkeypatch, capsys, "--replay", file)
    assert status == 0
    for word in ("query bfloat16[3, 4, 64]", "seq_lens [9]", "xla", "right"):
        assert word in printed.out


def wrong_xla(error=None):
    xla = registry.load("xla")

    def run(*arrays, **options):
        if error:
            raise error
        out, lse = xla.run(*arrays, **options)
        return out * 1.1, lse

    return dataclasses.replace(xla, run=run)


@pytest.mark.parametrize(
    ("error", "begins"),
    [(None, "wrong: "), (ValueError("so"), "failed: "), (UnsupportedError("so"), "refused: ")],
)
def test_the_command_fails_for_wrong_results(file, monkeypatch, capsys, error, begins):
    """And for errors, but not for a refusal that comes late."""
    length = len(begins)  # a program of its own, which is not there yet
    keep(file, random_problem([length], [length], AttentionSpec(scale=0.3)))
    load = registry.load

    def tampered(name, framework=registry.Framework.JAX):
        return wrong_xla(error) if name == "xla" else load(name, framework)

    monkeypatch.setattr(select, "load", tampered)
    status, printed = rows_of(monkeypatch, capsys, "--replay", file, "--json")
    (row,) = (r for r in json.loads(printed.out)["rows"] if r["backend"] == "xla")
    assert row["result"].startswith(begins)
    assert status == (0 if begins == "refused: " else 1)


def test_the_command_says_what_is_no_record(file, monkeypatch, capsys):
    status, printed = rows_of(monkeypatch, capsys, "--replay", file)
    assert status == 2
    assert str(file) in printed.err
