"""The benchmarks: their cases, their reports, and peers that are not installed."""

import json
import os
import runpy
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("numba")
import torch
from benchmarks import gpu, machine, trees
from benchmarks.case import CpuCase
from benchmarks.cpu_threads import on_threads
from benchmarks.peers import PACKAGES, installed, missing
from benchmarks.peers.cpu import PEERS, paged
from benchmarks.peers.latents import LATENTS, PAGE, Latents
from benchmarks.releases import SHAPES, Release, measure
from benchmarks.report import Ceilings, Report
from benchmarks.turns import in_turns
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


@pytest.mark.usefixtures("on_cpu")
def test_trees_are_timed_beside_causal_queries(monkeypatch):
    case = case_of([8, 5], [20, 40])
    times = in_turns(partial(trees.on_cpu, case), trees.PARENTS)
    assert [*times] == [*trees.PARENTS]
    assert all(isinstance(us, float) for us in times.values()), times
    assert len(trees.row_of(case.shape, times).split()) == 2 + len(times)  # "a case" is two words

    monkeypatch.setitem(trees.PARENTS, "a chain", lambda index: index - 2 + (index == 0))
    times = in_turns(partial(trees.on_cpu, case), trees.PARENTS)
    assert "its answer differs" in times["a chain"]


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


@pytest.mark.skipif(not shutil.which("git"), reason="git is not installed")
def test_the_commit_is_that_of_a_checkout_itself(tmp_path):
    git = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b.org"]
    assert machine.commit(tmp_path) is None
    subprocess.run([*git, "init", "-q"], check=True)
    assert machine.commit(tmp_path) is None  # nothing is committed
    (tmp_path / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    clean = machine.commit(tmp_path)
    assert clean
    assert len(clean) >= 7
    (tmp_path / "file").write_text("2")
    assert machine.commit(tmp_path) == f"{clean}-dirty"
    (tmp_path / "inside").mkdir()
    assert machine.commit(tmp_path / "inside") is None


@pytest.mark.parametrize("commit", ["b8d6ba0", None])
def test_versions_have_the_commit_if_there_is_one(monkeypatch, commit):
    monkeypatch.setattr(machine, "commit", lambda: commit)
    assert machine.versions(()).get("commit") == commit


def test_without_git_a_report_names_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.commit(tmp_path) is None


def test_the_threads_of_a_trace_are_those_of_a_block_alone(monkeypatch):
    for before in (None, "3"):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if before:
            monkeypatch.setenv("OMP_NUM_THREADS", before)
        with on_threads(7):
            assert os.environ["OMP_NUM_THREADS"] == "7"
        assert os.environ.get("OMP_NUM_THREADS") == before


@pytest.mark.usefixtures("on_cpu")
def test_the_kernel_runs_on_the_threads_of_its_trace():
    cache = init_kv_cache(num_blocks=2, block_size=8, num_kv_heads=1, head_dim=32)
    batch = make_batch([1], [9], [[0, 1]], block_size=8)

    def program(threads):
        def attend(query):
            with on_threads(threads):
                return paged_attention(query, cache, batch, backend="numba")

        return jax.jit(attend).lower(jnp.ones((1, 1, 32), cache.dtype)).as_text()

    assert program(2) == program(2) != program(3)


def test_a_run_on_a_gpu_records_who_failed_and_who_came_too_late(tmp_path):
    def fails(case):
        raise RuntimeError("no such page\nand more")

    def slow(case):
        return 7.0

    report = Report(tmp_path / "h200.json", {"gpu": "?"}, ["slow"])
    contenders = {"fails": fails, "slow": slow}
    gpu.run(report, [case_of([1], [15])], contenders, ends=time.monotonic() + 100)
    gpu.run(report, [case_of([1], [31])], contenders, ends=0.0)  # the time is over
    (row,) = json.loads((tmp_path / "h200.json").read_text())["cases"].values()
    assert row["us"] == {"slow": 7.0}
    assert row["refused"] == {"fails": "RuntimeError: no such page"}
    assert gpu.measured(slow, case_of([1], [15]), ends=0.0) == "out of time"


@pytest.mark.parametrize("error", [0.0, 1.0])
def test_flashmla_is_called_by_its_signature(monkeypatch, error):
    """By a module with the package's documented names, shapes and order of arguments."""

    def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
        assert (num_q_tokens_per_head_k, num_heads_k) == (4, 1)
        return "schedule", None

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, schedule, splits, softmax_scale
    ):
        assert (schedule, splits) == ("schedule", None)
        batch, size = q.shape[0], q.shape[-1]
        keys = k_cache[block_table].reshape(batch, -1, size).float()
        assert cache_seqlens.tolist() == [keys.shape[1]] * batch
        logits = torch.einsum("bshd,bkd->bshk", q.float(), keys) * softmax_scale
        out = torch.einsum("bshk,bkd->bshd", logits.softmax(3), keys[..., :head_dim_v])
        return out + error, logits.logsumexp(3)

    module = SimpleNamespace(
        get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache
    )
    monkeypatch.setitem(sys.modules, "flash_mla", module)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "flash_mla" or None)
    work = Latents(3, 2 * PAGE, 4, (32, 8), device="cpu")
    out = LATENTS["FlashMLA"](work)(0)
    if error:
        with pytest.raises(AssertionError):
            work.require(out)
    else:
        work.require(out)


BENCHMARKS = Path(trees.__file__).parent
WITH_NAMES = [file.stem for file in BENCHMARKS.glob("*.py") if '"--only"' in file.read_text()]
ROOT = Path(__file__).parents[2]
REFUSED = {
    **{f"{name} -k nonsense": "nothing has a name that contains" for name in WITH_NAMES},
    "plot": "required: folder",
    "tables": "required: pages",
    "whole_step --cases foo": "'foo' is not BATCHxCONTEXT, such as 4x64",
    "whole_step --cases 4x64,0x1": "is not BATCHxCONTEXT",
    "scoreboard nobody": "invalid choice: 'nobody'",
    f"releases {ROOT} {BENCHMARKS}": "is no checkout of a release",
    f"releases {ROOT} {ROOT}": "different versions",
}
if jax.default_backend() == "cpu":
    REFUSED["gpu -k nonsense"] = "torch finds no NVIDIA GPU"


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", REFUSED)
def test_wrong_arguments_are_told_before_anything_is_timed(monkeypatch, capsys, command):
    name, *arguments = command.split()
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=False)
    assert end.value.code == 2
    assert REFUSED[command] in capsys.readouterr().err


def test_releases_are_timed_in_processes_of_their_own(monkeypatch):
    """This one twice; what one of them cannot do stands in its place."""
    root = Path(__file__).parents[2]
    releases = [Release(str(root)) for _ in range(2)]
    try:
        releases[1].version = "other"
        monkeypatch.setitem(SHAPES, "small", ([1, 3], [16, 32]))
        monkeypatch.setitem(SHAPES, "more queries than keys", ([33], [32]))
        found = measure(releases, "small")
        assert set(found) == {releases[0].version, "other"}
        assert all(isinstance(us, float) and us > 0 for us in found.values())
        found = measure(releases, "more queries than keys")
        assert all("InvalidInputError" in str(us) for us in found.values())
    finally:
        for release in releases:
            release.end()
