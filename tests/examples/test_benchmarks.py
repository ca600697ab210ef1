"""The benchmarks: their cases, their reports, and peers that are not installed."""

import json
import os

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("numba")
import torch
from benchmarks.case import CpuCase
from benchmarks.cpu_threads import on_threads
from benchmarks.peers import PACKAGES, installed, missing
from benchmarks.peers.cpu import PEERS, paged
from benchmarks.report import Ceilings, Report
from hypothesis import given
from hypothesis import strategies as st

from pagedattn import init_kv_cache, make_batch, paged_attention

LENS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def case_of(query_lens: list[int], context_lens: list[int], **options) -> CpuCase:
    lens = zip(query_lens, context_lens, strict=False)
    seq_lens = [query + context for query, context in lens]
    return CpuCase("a case", query_lens[: len(seq_lens)], seq_lens, dtype_name="float32", **options)


@given(LENS, LENS, st.sampled_from([8, 16]))
def test_peers_compute_what_is_expected_or_say_why_not(query_lens, context_lens, block_size):
    case = case_of(query_lens, context_lens, block_size=block_size)
    for name, peer in PEERS.items():
        if missing(name):
            continue
        try:
            call = peer(case)
        except ValueError:
            continue
        out = call()
        case.require(out if isinstance(out, torch.Tensor) else torch.tensor(out.tolist()))


@given(LENS, st.sampled_from([16, 32, 64]))
def test_copied_blocks_hold_the_same_tokens(context_lens, block_size):
    case = case_of([1] * len(context_lens), context_lens, block_size=8)
    try:
        *planes, tables = paged(case, block_size)
    except ValueError:
        assert case.tables.shape[1] * 8 % block_size
        return
    assert tables.dtype == torch.int32
    for seq, length in enumerate(case.seq_lens):
        for plane, want in zip(planes, case.dense([seq]), strict=True):
            rows = plane[tables[seq].long()].flatten(0, 1)[:length]
            torch.testing.assert_close(rows, want[0].transpose(0, 1), rtol=0, atol=0)


def test_a_freed_case_is_made_again_alike():
    case = case_of([3, 1], [5, 20])
    before = case.query, *case.planes, case.tables, case.expected
    case.free()
    assert "query" not in vars(case)
    after = case.query, *case.planes, case.tables, case.expected
    for old, new in zip(before, after, strict=True):
        assert old is not new
        torch.testing.assert_close(old, new, rtol=0, atol=0)


def test_a_wrong_answer_is_refused():
    case = case_of([1, 1], [5, 20])
    with pytest.raises(ValueError, match="differs by 200"):
        case.require(-case.expected)


def test_peers_that_are_not_installed_are_left_out_with_a_cure(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "vllm" or None)
    left_out = {}
    names = ["FlashInfer decode", "FlashMLA", "vLLM, block 32", "JAX Pallas"]
    kept = installed(dict.fromkeys(names, print), left_out.__setitem__)
    assert list(kept) == ["FlashMLA", "vLLM, block 32", "JAX Pallas"]  # vLLM brings FlashMLA
    assert left_out == {"FlashInfer decode": PACKAGES["FlashInfer"][1]}


def test_a_report_grows_in_its_file(tmp_path, capsys):
    path, case = tmp_path / "cpu.json", case_of([1, 1], [1023, 1023])
    report = Report(path, {"cpu": "?"}, ["ours"], Ceilings(kv_bytes=1e12, flops=1e12))
    row = report.begin(case, dtype="float32")
    report.add(row, "ours", case.kv_bytes / 1e6)  # a TB/s
    report.add(row, "theirs", "ValueError: no")
    (written,) = json.loads(path.read_text())["cases"].values()
    assert written["us"] == {"ours": case.kv_bytes / 1e6}
    assert written["refused"] == {"theirs": "ValueError: no"}
    assert "1.00 TB/s   1.00" in capsys.readouterr().out
    fewer = Report(path, {}, ["ours"], key=("on_fewer_threads", "1"))
    fewer.add(fewer.begin(case), "ours", 2.0)
    data = json.loads(path.read_text())
    assert data["cases"][case.name]["us"] != data["on_fewer_threads"]["1"]["cases"][case.name]["us"]


def test_the_threads_of_a_trace_are_those_of_a_block_alone(monkeypatch):
    for before in (None, "3"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if before:
            monkeypatch.setenv("OMP_NUM_THREADS", before)
        with on_threads(7):
            assert os.environ["OMP_NUM_THREADS"] == "7"
        assert os.environ.get("OMP_NUM_THREADS") == before


def test_the_kernel_runs_on_the_threads_of_its_trace():
    cache = init_kv_cache(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=32)
    batch = make_batch([1], [9], [[0, 1]], block_size=8)

    def program(threads):
        def attend(query):
            with on_threads(threads):
                return paged_attention(query, cache, batch, backend="numba")

        return jax.jit(attend).lower(jnp.ones((1, 1, 32), cache.dtype)).as_text()

    assert program(2) == program(2) != program(3)
