"""The sizes by which `backend=None` chooses: as a record, passed, and measured."""

import dataclasses
import json
import sys

import jax
import pytest
from cases import good_call
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_interop import to_torch

import pagedattn_torch
from pagedattn import (
    AttentionSpec,
    Crossings,
    InvalidInputError,
    explain,
    paged_attention,
    select_backend,
)
from pagedattn.__main__ import main
from pagedattn._dispatch import registry
from pagedattn._dispatch.call import KEYWORDS, Call, Strides
from pagedattn._dispatch.crossings import NEVER
from pagedattn.backends import cudnn, mosaic
from pagedattn.report import text, tune

FIELDS = [field.name for field in dataclasses.fields(Crossings)]
records = st.builds(Crossings, **dict.fromkeys(FIELDS, st.integers(0, NEVER)))


@given(records)
def test_a_record_is_printed_as_a_program_writes_it(record):
    assert eval(repr(record)) == record
    assert repr(Crossings()) == "Crossings()"


@pytest.mark.parametrize("value", [-1, 2.5, "64", None, True, NEVER + 1])
def test_a_field_that_is_no_size_is_refused(value):
    with pytest.raises(
        InvalidInputError, match="mosaic_query_len must be an integer of at least 0"
    ):
        Crossings(mosaic_query_len=value)


def a_call(num_seqs=64, max_query_len=1, num_heads=32, num_kv_heads=8, **fields) -> Call:
    return Call(
        num_tokens=num_seqs * max_query_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        num_blocks=9,
        num_seqs=num_seqs,
        max_query_len=max_query_len,
        dtype="bfloat16",
        strides=Strides((), (), ()),
        block_size=16,
        device="cuda",
        spec=AttentionSpec(),
        **{"head_dim": 128, "max_blocks": 256} | fields,
    )


LATENTS = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512}
CALLS = {
    "decodes": (mosaic, a_call()),
    "short decodes": (mosaic, a_call(num_seqs=8)),
    "drafts": (mosaic, a_call(max_query_len=8)),
    "chunks": (mosaic, a_call(num_seqs=8, max_query_len=128)),
    "latents": (mosaic, a_call(**LATENTS)),
    "latents of few heads": (mosaic, a_call(**LATENTS | {"num_heads": 16})),
    "prefills": (cudnn, a_call(num_seqs=2, max_query_len=4096)),
}


def reasons(name, **changes):
    backend, call = CALLS[name]
    call = dataclasses.replace(call, crossings=dataclasses.replace(call.crossings, **changes))
    return backend.BACKEND.why_passed_over(call)


@pytest.mark.parametrize(
    ("name", "ahead", "behind"),
    [
        ("decodes", {}, {"mosaic_fewest_decodes": 513}),
        ("decodes", {"mosaic_fewest_decodes": 512}, {"mosaic_most_decodes": 511}),
        ("decodes", {"mosaic_most_decodes": 512}, {"mosaic_decode_keys": 4096}),
        ("decodes", {"mosaic_decode_keys": 4095}, {"mosaic_decode_keys": NEVER}),
        ("short decodes", {"mosaic_fewest_decodes": 64}, {}),
        ("drafts", {}, {"mosaic_many_query_len": 9}),
        ("drafts", {"mosaic_many_seqs": 64}, {"mosaic_many_seqs": 65}),
        ("drafts", {"mosaic_many_keys": 64 * 4096}, {"mosaic_many_keys": 64 * 4096 + 1}),
        ("chunks", {}, {"mosaic_query_len": 129}),
        ("latents", {"latent_work": 64 * 128 * 4096}, {"latent_work": 64 * 128 * 4096 + 1}),
        ("latents", {"latent_keys": 4096}, {"latent_keys": 4097}),
        ("latents of few heads", {"latent_keys": 4096}, {"latent_keys": 4097}),
        ("prefills", {}, {"cudnn_query_len": 4097}),
        ("prefills", {"cudnn_work": 1 << 25}, {"cudnn_work": (1 << 25) + 1}),
    ],
)
def test_a_rule_turns_at_its_field(name, ahead, behind):
    assert reasons(name, **ahead) == []
    assert reasons(name, **behind) != []


@pytest.mark.parametrize(("block_size", "passed_over"), [(16, False), (64, False), (128, True)])
def test_decodes_in_large_blocks_are_left_to_triton(block_size, passed_over):
    call = dataclasses.replace(a_call(max_blocks=4096 // block_size), block_size=block_size)
    assert bool(mosaic.BACKEND.why_passed_over(call)) == passed_over


@pytest.fixture
def without_numba(monkeypatch):
    """The choice of a CPU where it is not installed."""
    monkeypatch.setattr(registry, "order", lambda framework: ("sdpa", "xla"))


@pytest.mark.usefixtures("on_cpu", "without_numba")
@pytest.mark.parametrize(("work", "taken"), [(0, "sdpa"), (NEVER, "xla")])
def test_a_record_chooses_where_it_is_passed(work, taken):
    record, call = Crossings(sdpa_work=work), good_call()
    assert select_backend(*call, crossings=record) == taken
    explanation = explain(*call, crossings=record)
    assert explanation.choice == taken
    assert ("sdpa" in explanation.passed_over) == (taken == "xla")
    attend = jax.jit(paged_attention, static_argnames=("spec", "backend"))
    assert attend(*call, backend=record).shape == paged_attention(*call, backend=record).shape


@pytest.mark.usefixtures("on_cpu")
def test_tensors_take_a_record_too():
    query, cache, batch, spec = good_call()
    tensors = to_torch((query, cache), copy=True)
    record = Crossings(mosaic_query_len=1)
    chosen = pagedattn_torch.select_backend(*tensors, batch, spec, crossings=record)
    assert pagedattn_torch.explain(*tensors, batch, spec, crossings=record).choice == chosen
    step = pagedattn_torch.prepare(*tensors, batch, spec, backend=record)
    assert step.backend.name == chosen
    assert pagedattn_torch.paged_attention(*tensors, batch, spec, backend=record).shape


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("ask", [explain, select_backend])
def test_what_is_no_record_is_refused(ask):
    with pytest.raises(InvalidInputError, match="crossings must be Crossings, got 3"):
        ask(*good_call(), crossings=3)


def test_it_is_no_option():
    """A backend of someone else's need not list it, and no program is compiled for it."""
    assert "crossings" not in KEYWORDS
    call = dataclasses.replace(a_call(), crossings=Crossings(sdpa_work=1))
    assert call.set_options == ()


ALL = {"mosaic", "cudnn", "triton", "sdpa", "xla"}


def crossing_of(field):
    return next(one for one in tune.CROSSINGS if one.field == field)


@given(st.data())
@pytest.mark.parametrize("field", [one.field for one in tune.CROSSINGS])
def test_a_crossing_is_found_where_it_is(field, data):
    """At the least size that is tried and beyond it; or never."""
    one = crossing_of(field)
    turn = data.draw(st.integers(0, 2 * one.sizes[-1]))

    def measure(name, work):
        size = next(size for size in one.sizes if one.work(size) == work)
        return 1.0 if (name == one.taken) == (size >= turn) else 2.0

    row = tune._row(one, measure, lambda: False)
    beyond = [size for size in one.sizes if size >= turn]
    expected = one.figure(beyond[0], one.work(beyond[0])) if beyond else NEVER
    assert row.figure == expected
    assert set(row.microseconds) <= set(one.sizes)
    assert len(row.microseconds) <= len(one.sizes).bit_length()


def test_figures_are_what_the_rules_compare_with():
    """With the crossing at a size, the rule takes the backend there and not one size before."""
    for field, backend in {
        "mosaic_query_len": mosaic,
        "cudnn_query_len": cudnn,
        "latent_work": mosaic,
        "mosaic_fewest_decodes": mosaic,
        "mosaic_many_query_len": mosaic,
    }.items():
        one = crossing_of(field)
        before, size = one.sizes[1:3]
        record = Crossings(**{field: one.figure(size, one.work(size))})
        for tried, taken in ((before, False), (size, True)):
            work = one.work(tried)
            sizes = {"num_heads": work.num_heads, "num_kv_heads": work.num_kv_heads}
            sizes |= {"head_dim": 128 if work.value_dim is None else 576}
            call = a_call(
                len(work.seq_lens),
                max(work.query_lens),
                **sizes,
                value_dim=work.value_dim,
                max_blocks=work.num_keys // 16,
                crossings=record,
            )
            assert (backend.BACKEND.why_passed_over(call) == []) == taken, field


def test_only_what_is_usable_is_measured():
    asked = []

    def measure(name, work):
        asked.append(name)
        return 1.0

    found = tune.tune(measure, lambda work: {"cudnn", "triton", "xla"})
    assert [row["field"] for row in found["rows"]] == ["cudnn_query_len"]
    assert set(asked) == {"cudnn", "triton"}
    assert tune.tune(measure, lambda work: {"numba", "sdpa", "xla"})["rows"] == []
    found = tune.tune(measure, lambda work: {"sdpa", "xla"})
    assert [row["field"] for row in found["rows"]] == ["sdpa_work"]
    assert found["record"] == repr(Crossings(sdpa_work=NEVER))  # never is it the faster one


def test_time_is_bounded():
    """What does not fit keeps the figure that it has, and is told."""
    now = [0.0]

    def measure(name, work):
        now[0] += 10.0
        return 1.0 if name == "mosaic" else 2.0

    found = tune.tune(measure, lambda work: ALL, seconds=100.0, clock=lambda: now[0])
    assert now[0] <= 100 + 20
    done = {row["field"]: row["figure"] for row in found["rows"]}
    assert done["mosaic_query_len"] == 16
    assert done["sdpa_work"] is None
    assert found["crossings"]["sdpa_work"] == Crossings().sdpa_work
    (rows,) = (part for part in text.tuned(found) if not isinstance(part, str))
    assert rows[-1][0] == "sdpa_work = not measured: no time"


def test_calls_of_this_machine_are_timed():
    work = tune.Work((3, 1), (9, 20), num_heads=4, num_kv_heads=2, head_dim=16)
    assert "xla" in tune.usable_for(work)
    assert "mosaic" not in tune.usable_for(work) or jax.default_backend() == "gpu"
    assert 0 < tune.seconds_of("xla", work) < 10
    latents = work._replace(num_kv_heads=1, value_dim=8)
    assert tune.seconds_of("xla", latents) > 0


def test_the_command_prints_the_record(monkeypatch, capsys):
    found = tune.tune(lambda name, _work: float(name == "xla"), lambda work: {"sdpa", "xla"})
    monkeypatch.setattr(tune, "tune", lambda: found)
    for arguments in (["--tune"], ["--tune", "--json"]):
        monkeypatch.setattr(sys, "argv", ["pagedattn", *arguments])
        assert main() == 0
    screen, printed = capsys.readouterr().out.split("{", 1)
    assert "sdpa_work = " in screen
    assert json.loads("{" + printed) == json.loads(json.dumps(found))
    none = {"device": "cpu", "rows": []}
    assert text.tuned(none) == [text.NO_CROSSING.format("cpu")]
