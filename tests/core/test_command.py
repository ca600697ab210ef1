"""`python -m pagedattn`: what it prints, that it fits a screen, and how it ends."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import jax
import pytest
from forked import run_forked

pytest.importorskip("rich")

import pagedattn
from pagedattn.__main__ import main
from pagedattn._dispatch.registry import can_load
from pagedattn.report import gather, machine, probe, selfcheck, text
from pagedattn.report.colour import coloured

# Lines. A machine with a GPU has more devices and backends to tell of, and their reasons.
SCREEN = 50 if jax.default_backend() == "cpu" else 70
COMMAND = "import runpy; runpy.run_module('pagedattn', run_name='__main__')"


def without(module: str) -> str:
    """The command where a module cannot be imported."""
    return f"import sys; sys.modules[{module!r}] = None; {COMMAND}"


@functools.cache
def run(*arguments: str) -> subprocess.CompletedProcess:
    return run_forked(COMMAND, "jax.numpy", "torch", argv=arguments)


@functools.cache
def run_without(module: str, *arguments: str) -> subprocess.CompletedProcess:
    imported = ["jax.numpy", *["torch"] * (module != "torch")]
    return run_forked(without(module), *imported, argv=arguments)


@pytest.mark.parametrize("printed", [run, lambda: run_without("rich")], ids=["rich", "plain"])
def test_it_fits_a_screen(printed):
    done = printed()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"pagedattn {pagedattn.__version__}")
    assert max(map(len, lines)) < 80
    assert len(lines) < SCREEN
    for word in ("encoder_decoder", "logits_soft_cap", "xla", "sdpa", "yes", "jaxlib", "driver"):
        assert word in done.stdout


@pytest.mark.parametrize("without", ["rich", "torch"])
def test_commands_to_install_keep_their_brackets(without):
    missing = {"rich": "ipex", "torch": "torch"}[without]
    if missing == "ipex" and jax.default_backend() == "gpu":
        pytest.skip("no command would make ipex run on it")
    assert f"'pagedattn[{missing}]'" in run_without(without).stdout.split()


def test_rich_eats_no_brackets():
    shown = coloured(["pip install 'pagedattn[ipex]'", [("[bold]a", "b"), ("x[ipex]", "[red]")]])
    for word in ("pagedattn[ipex]", "[bold]a", "x[ipex]", "[red]"):
        assert word in shown


DEATHS = {"SIGBUS": "os.kill(os.getpid(), signal.SIGBUS)", "status 3": "os._exit(3)"}


@pytest.mark.parametrize("end", DEATHS)
def test_a_backend_that_ends_its_process_is_none(tmp_path, monkeypatch, end):
    """It looks usable until it computes: an entry point of the environment that the probes see."""
    made = tmp_path / "deadly-1.dist-info"
    made.mkdir()
    (made / "METADATA").write_text("Metadata-Version: 2.1\nName: deadly\nVersion: 1\n")
    (made / "entry_points.txt").write_text("[pagedattn.backends]\ndeadly = deadly:BACKEND\n")
    (tmp_path / "deadly.py").write_text(
        "import os, signal\nfrom dataclasses import replace\n"
        "from pagedattn.backends.xla import BACKEND as XLA\n"
        f"def run(*arguments, **options):\n    {DEATHS[end]}\n"
        "BACKEND = replace(XLA, name='deadly', run=run, before=None)\n"
    )
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    found = probe.probed({"deadly": {"jax": []}, "xla": {"jax": []}, "flash": {"jax": ["no"]}})()
    assert found["xla"] == {"jax": []}
    assert found["flash"] == {"jax": ["no"]}
    (reason,) = found["deadly"]["jax"]
    assert end in reason


def test_a_backend_that_raises_is_none():
    assert "BackendUnavailableError" in str(probe.why_not("nonsense", "jax"))
    assert probe.why_not("xla", "jax") is None


def test_a_tiny_call_gives_torch_its_own_tensors():
    pytest.importorskip("torch")
    assert "BackendUnavailableError" in str(probe.why_not("nonsense", "torch"))
    assert probe.why_not("sdpa", "torch") is None


def test_the_processor_is_named(tmp_path):
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nmodel name\t: AMD EPYC 9B14\nmodel name\t: other\n")
    assert machine.processor(file).startswith("AMD EPYC 9B14, ")
    assert machine.processor(tmp_path / "none")
    assert "Processor: " in run().stdout


def test_as_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pagedattn", "--json"])
    assert main() == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["pagedattn"] == pagedattn.__version__
    assert found["devices"]
    assert found["backends"]["xla"] == {"jax": []}
    if can_load("numba") and jax.default_backend() == "cpu":
        assert found["backends"]["numba"]["jax"] == []
    assert "check" not in found


def test_help_and_wrong_arguments():
    assert "--check" in run("--help").stdout
    done = run("--nonsense")
    assert done.returncode == 2
    assert "--nonsense" in done.stderr


def test_a_closed_pipe_is_no_error():
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", without("torch")]  # which is slow to import
    writer = subprocess.Popen(command, **pipes)
    assert writer.stdout
    writer.stdout.close()
    _, errors = writer.communicate()
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors
    assert writer.returncode == 0


def test_the_check_needs_no_hypothesis_and_passes():
    done = run_without("hypothesis", "--check", "--json")
    assert done.returncode == 0, done.stderr
    results = {(row["backend"], row["result"]) for row in json.loads(done.stdout)["check"]}
    assert ("xla", "ok") in results


def test_the_check_finds_a_wrong_backend(monkeypatch):
    xla = selfcheck.registry.load("xla")

    def wrong(call, query, cache, plan):
        out, lse = xla.run(call, query, cache, plan)
        return out * 1.1, lse

    monkeypatch.setattr(
        selfcheck.registry, "load", lambda name: dataclasses.replace(xla, run=wrong)
    )
    row = selfcheck.check("xla", selfcheck.CASES[0])
    assert row["result"].startswith("FAILED")
    assert gather.failures({"check": [row]})


def test_a_machine_without_a_device(monkeypatch):
    def devices():
        raise RuntimeError("no CUDA here")

    monkeypatch.setattr(machine.jax, "devices", devices)
    found = gather.gather(check=True)
    assert gather.failures(found) == ["no CUDA here"]
    assert "JAX finds no device: no CUDA here" in text.plain(text.parts(found))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="JAX finds a device")
def test_jax_without_the_device_that_it_is_told_to_use():
    """Where no plugin is installed JAX asserts, and says nothing."""
    done = run_forked(f"import os; os.environ['JAX_PLATFORMS'] = 'cuda'; {COMMAND}")
    assert done.returncode == 1, done.stderr
    said = done.stdout.partition("JAX finds no device: ")[2]
    assert "cuda" in said
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        (["NVIDIA H200"] * 2, ()),
        (["NVIDIA L4"] * 8, ("NVIDIA L4",)),
        (["NVIDIA H200", "NVIDIA A100-SXM4-40GB"], ("NVIDIA A100-SXM4-40GB",)),
        (["cpu"], ()),
    ],
)
def test_a_gpu_that_nobody_has_measured_is_told_once(monkeypatch, recwarn, kinds, told):
    """However many of a kind there are; and not by a warning."""
    devices = [
        types.SimpleNamespace(device_kind=kind, platform="cpu" if kind == "cpu" else "gpu")
        for kind in kinds
    ]
    monkeypatch.setattr(machine.jax, "devices", lambda: devices)
    nothing = {"versions": {}, "driver": None, "processor": "", "kernel": None, "backends": {}}
    found = nothing | {"devices": machine.devices(), "unmeasured": machine.unmeasured()}
    found["features"] = {"rows": [], "reasons": {}}
    assert found["unmeasured"] == told
    shown = [part for part in text.parts(found) if "Nobody has measured" in part]
    assert len(shown) == len(told)
    assert all(kind in shown[0] for kind in told)
    assert not recwarn


def test_the_gpus_called_measured_are_those_of_the_figures():
    files = Path(__file__).parents[2].glob("docs/results/*.json")
    reports = [json.loads(file.read_text()) for file in files]
    machines = [report["machine"] for report in reports if "peers" not in report]
    devices = {each.get("device", each.get("gpu", "cpu")) for each in machines}
    assert devices - {"cpu"} == set(machine.MEASURED)


def test_the_driver_is_read_where_linux_has_it(tmp_path):
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Tue Jan 14\nGCC 1")
    assert machine.driver(file) == "570.86.15"
    assert machine.driver(tmp_path / "none") is None


def test_strategies_say_what_to_install():
    code = (
        "import sys; sys.modules['hypothesis'] = None; import pagedattn.testing\n"
        "try: from pagedattn.testing import strategies\n"
        "except ImportError as error: print(type(error).__name__, error)"
    )
    done = run_forked(code, "jax.numpy")
    assert done.stdout.startswith("BackendUnavailableError")
    assert "pip install 'pagedattn[testing]'" in done.stdout


@pytest.mark.parametrize(("columns", "most"), [("200", 79), ("60", 59), ("3", 40)])
def test_a_report_fits_the_screen(monkeypatch, columns, most):
    """As wide as the screen, from 40 columns to 79."""
    monkeypatch.setenv("COLUMNS", columns)
    shown = ["many words " * 40, [("feature", "xla"), ("many words " * 40, "yes")]]
    for made in (text.plain(shown), coloured(shown)):
        lines = [line.rstrip() for line in made.splitlines()]
        assert most - 12 < max(map(len, lines)) <= most


def test_a_table_of_many_columns_fits():
    """As on a machine with a GPU, whose backends are more."""
    rows = [[f"{'a long word ' * n}{i}" for i, n in enumerate((1, 5, 9, 1, 3))]] * 2
    lines = text.plain([rows]).splitlines()
    assert max(map(len, lines)) <= text.width()
    assert " ".join(lines).count("long") == 2 * 19
