"""The scoreboard: its cells, how peers are asked and judged, and the page that is written of it."""

import json
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from benchmarks.scoreboard import ask, flash, flashinfer, peer
from benchmarks.scoreboard.ask import PEERS, answer, answers, not_offered
from benchmarks.scoreboard.cells import COLUMNS, OTHERS, Cell, cells, needs, problem_of, rows
from benchmarks.scoreboard.page import kind, page

from pagedattn import AttentionSpec
from pagedattn.testing import Problem, features, reference_attention

pytestmark = pytest.mark.usefixtures("on_cpu")
ROOT = Path(__file__).parents[2]
FOUND = json.loads((ROOT / "docs/results/scoreboard.json").read_text())


def test_the_page_is_that_of_the_answers():
    command = "python -m benchmarks.scoreboard --json ... --page docs/scoreboard.md NAME"
    assert (ROOT / "docs/scoreboard.md").read_text() == page(FOUND), command


def test_every_answer_is_of_a_cell_of_today():
    """And what is not offered is what the code says."""
    for name, about in FOUND["peers"].items():
        answered = {Cell(r, c): a for r, row in about["rows"].items() for c, a in row.items()}
        assert list(answered) == cells()
        assert set(about["versions"]) >= {"python", "pagedattn", *PEERS[name].packages[:1]}
        for cell, result in answered.items():
            reason = not_offered(PEERS[name], cell)
            assert (kind(result) == "not offered") == bool(reason)
            assert reason in (None, result)


def test_the_cells_are_those_of_the_features_table():
    """Causality, and with it the type of attention, is a matter of the columns."""
    causal = [name for name in features.OPTIONS if "causal" not in name]
    assert list(rows()) == [*causal, *OTHERS]
    decoder = features.ATTENTION_TYPES["decoder"].phases
    assert tuple(COLUMNS) == (*decoder, "encoder", "cross")


def test_this_library_lacks_nothing_that_is_asked():
    assert not [cell for cell in cells() if not_offered(PEERS["pagedattn"], cell)]
    results = FOUND["peers"]["pagedattn"]["rows"]
    assert {a for row in results.values() for a in row.values()} == {"right"}


def test_needs_are_names_of_what_peers_take():
    known = {need for cell in cells() for need in needs(cell)}
    assert {take for one in PEERS.values() for take in one.takes} <= known
    assert needs(Cell("latent, all", "mixed"))[-3:] == ["bias", "cache_dtype", "latent"]


def of_oracle(change=lambda problem: problem, **fields) -> peer.Peer:
    def attend(problem):
        problem = change(problem)
        lens, starts = problem.seq_lens, problem.query_start_loc
        arrays = problem.query, problem.key_cache, problem.value_cache, problem.block_tables
        beside = problem.sinks, problem.bias, problem.key_scale, problem.value_scale
        beside = *beside, problem.value_dim, problem.selection, problem.parents
        return reference_attention(*arrays, lens, starts, problem.spec, *beside)

    return PEERS["pagedattn"]._replace(attend=attend, **fields)


@pytest.mark.parametrize("cell", [cell for cell in cells() if cell.column in ("mixed", "cross")])
def test_the_oracle_is_right(cell):
    assert answer(of_oracle(), cell) == "right"


def narrower(problem: Problem) -> Problem:
    window = problem.spec.sliding_window
    return problem.replace(spec=AttentionSpec(sliding_window=window and window - 1))


def test_wrong_answers_refusals_and_missing_lse_are_told():
    cell = Cell("sliding_window", "decode")
    assert answer(of_oracle(narrower), cell).startswith("wrong: out is off in")
    assert answer(of_oracle(narrower), Cell("plain", "decode")) == "right"

    def refuse(problem):
        raise ValueError("no such head\nat all")

    assert answer(of_oracle(refuse), cell) == "refused: ValueError: no such head"
    without = of_oracle()
    without = without._replace(
        attend=lambda problem, attend=without.attend: (attend(problem)[0], None)
    )
    assert answer(without, cell) == "right"
    assert answer(without, Cell("lse", "decode")) == "refused: it gave no lse"


def test_what_a_peer_has_no_argument_for_is_not_asked():
    picky = of_oracle(
        takes=frozenset({"scale"}), lacks=lambda c: "so" if c.row == "plain" else None
    )
    assert not_offered(picky, Cell("scale", "mixed")) is None
    assert not_offered(picky, Cell("scale", "cross")) == "not offered: causal=False"
    assert not_offered(picky, Cell("plain", "mixed")) == "not offered: so"


def test_answers_of_another_time_are_kept_for_cells_that_are_still_there():
    gone, rows = {"of old": {"decode": "right"}}, dict(FOUND["peers"]["torch SDPA"]["rows"])
    assert ask.up_to_date("torch SDPA", rows | gone) == rows
    del rows["scale"], rows["sinks"]
    found = ask.up_to_date("torch SDPA", rows)
    assert set(found["scale"].values()) == {"not asked"}
    assert set(found["sinks"].values()) == {"not offered: sinks"}


def test_an_answer_that_ends_the_process_is_one(monkeypatch):
    """The cells after it are asked again, of a new process."""
    few = [Cell("plain", c) for c in ("prefill", "decode", "mixed")]
    monkeypatch.setattr(ask, "cells", lambda: few)

    class Process:
        def __init__(self, command, **_):
            self.asked = [Cell(*cell) for cell in json.loads(command[-1])]
            self.returncode = -signal.SIGSEGV if Cell("plain", "decode") in self.asked else 0

        def communicate(self, timeout):
            alive = self.asked[: 1 if self.returncode else None]
            return "hello\n" + "".join(f'{ask.MARK}"right"\n' for _ in alive), ""

    monkeypatch.setattr(ask.subprocess, "Popen", Process)
    assert answers("pagedattn") == {
        "plain": {"prefill": "right", "decode": "crashed: SIGSEGV", "mixed": "right"}
    }


def test_a_process_answers():
    command = [sys.executable, "-m", "benchmarks.scoreboard.ask", "torch SDPA"]
    asked = json.dumps([["plain", "decode"], ["bias", "mixed"]])
    there = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, asked], capture_output=True, text=True, env=there)
    assert done.stdout.count(f'{ask.MARK}"right"') == 2, done.stderr


@pytest.mark.parametrize("name", [n for n in FOUND["peers"] if not peer.missing(PEERS[n])])
def test_peers_that_are_here_answer_as_the_page_says(name):
    cell = Cell("sliding_window", "decode")
    assert answer(PEERS[name], cell) == FOUND["peers"][name]["rows"][cell.row][cell.column]


def by_oracle(query, planes, tables, lens, starts, spec, sinks=None, scales=(None, None)):
    """out `[tokens, heads, columns]` and lse `[tokens, heads]` of tensors, as float32 tensors."""
    arrays = [x.double().numpy() for x in (query, *planes)]
    sinks = None if sinks is None else sinks.double().numpy()
    integers = (x.numpy() for x in (tables, lens, starts))
    out, lse = reference_attention(*arrays, *integers, spec, sinks, None, *scales)
    return torch.from_numpy(out), torch.from_numpy(lse)


def varlen(
    q,
    k,
    v,
    *,
    cu_seqlens_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    softmax_scale,
    causal,
    softcap,
    tables,
    window,
    alibi_slopes=None,
    sinks=None,
):
    """What FlashAttention documents: windows without the token itself, lse with heads first."""
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(seqused_k.max())
    if window is not None:
        assert window[1] == (0 if causal else window[0])
    spec = AttentionSpec(
        scale=softmax_scale,
        causal=causal,
        sliding_window=None if window is None else window[0] + 1,
        logits_soft_cap=softcap or None,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.tolist(),
    )
    out, lse = by_oracle(q, (k, v), tables, seqused_k, cu_seqlens_q, spec, sinks)
    return out.to(q.dtype), lse.T


def vllm_func(
    *planes, block_table, fa_version, return_softmax_lse, window_size=None, s_aux=None, **options
):
    assert fa_version in (2, 3)
    assert return_softmax_lse
    return varlen(*planes, tables=block_table, window=window_size, sinks=s_aux, **options)


def flash4_func(*planes, page_table, return_lse, window_size, learnable_sink=None, **options):
    assert return_lse
    window = None if window_size == (None, None) else window_size
    return varlen(*planes, tables=page_table, window=window, sinks=learnable_sink, **options)


class Wrapper:
    """What FlashInfer documents: CSR tables, windows to the left, the lse of base 2."""

    def __init__(self, room, layout):
        assert layout == "NHD"

    def plan(
        self,
        starts,
        begins,
        ids,
        last,
        num_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
    ):
        counts = begins.diff()
        self.tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for row, first, count in zip(self.tables, begins, counts, strict=False):
            row[:count] = ids[first : first + count]
        self.lens, self.starts = (counts - 1) * page_size + last, starts
        window = None if window_left < 0 else window_left + 1
        cap = {"logits_soft_cap": logits_soft_cap, "sliding_window": window}
        self.spec = AttentionSpec(scale=sm_scale, causal=causal, **cap)

    def run(self, query, planes, *, return_lse, k_scale=None, v_scale=None, sinks=None):
        assert return_lse
        about = self.tables, self.lens, self.starts, self.spec
        out, lse = by_oracle(query, planes, *about, sinks, (k_scale, v_scale))
        return out.to(query.dtype), lse / np.log(2)


class WrapperOfSinks(Wrapper):
    """And for sinks: it is told of types and windows at once, and of scales again in `run`."""

    def __init__(self, room, layout, **about):
        super().__init__(room, layout)
        self.about = about

    def plan(self, *args, window_left, q_data_type, kv_data_type, **options):
        dtypes = {"q_data_type": q_data_type, "kv_data_type": kv_data_type}
        told = dtypes | {"window_left": window_left}
        assert self.about == told | {"head_dim_qk": args[6], "head_dim_vo": args[6]}
        super().plan(*args, **told, **options)

    def run(self, query, planes, sinks, scale, *, return_lse):
        assert sinks.dtype == torch.float32
        assert scale == self.spec.scale
        return super().run(query, planes, return_lse=return_lse, sinks=sinks)


@pytest.mark.parametrize(
    "name", ["FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "FlashInfer"]
)
@pytest.mark.parametrize("column", ["mixed", "cross"])
def test_peers_on_gpus_are_called_as_they_document(monkeypatch, name, column):
    """Their names and conventions, with the oracle in their place."""
    fakes = {
        "vllm.vllm_flash_attn": {"flash_attn_varlen_func": vllm_func},
        "flash_attn.cute": {"flash_attn_varlen_func": flash4_func},
        "flashinfer": {
            "BatchPrefillWithPagedKVCacheWrapper": Wrapper,
            "BatchAttentionWithAttentionSinkWrapper": WrapperOfSinks,
        },
    }
    for module, functions in fakes.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**functions))
    for module in (flash, flashinfer):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    asked = [c for c in cells() if c.column == column and not not_offered(PEERS[name], c)]
    asked = [cell for cell in asked if not cell.row.startswith("NaN")]
    assert len(asked) > 5
    assert {cell: answer(PEERS[name], cell) for cell in asked} == dict.fromkeys(asked, "right")


def test_problems_fit_what_they_say():
    latent = problem_of(Cell("latent", "decode"))
    assert latent.value_cache is None
    assert latent.key_cache.shape[2:] == (1, 576)
    assert str(problem_of(Cell("float16", "mixed")).query.dtype) == "float16"
    poisoned = problem_of(Cell("NaN in unused slots", "mixed"))
    assert np.isnan(poisoned.key_cache.astype(float)).any()
