"""`pagedattn-serve` as a command: what it refuses, and how it ends."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from http_server import check_a_stream_outlives_sigterm
from pagedattn_serving.checkpoint.folder import save_checkpoint
from pagedattn_serving.server import arguments, command, launch
from pagedattn_serving.training.initial import init_params
from tiny import QUICK, TINY, saved_tiny

COMMAND = [sys.executable, "-m", "pagedattn_serving"]
SMALL = ["--port", "0", "--num-blocks", "16", "--max-seqs", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_tiny(tmp_path_factory.mktemp("tiny") / "tiny-bytes")


def said(monkeypatch, *args):
    """What the command says when it refuses."""
    monkeypatch.setattr(sys, "argv", [command.NAME, "--port", "0", *map(str, args)])
    monkeypatch.setattr(command, "run", lambda *_: None)  # a test is to fail, not to serve
    with pytest.raises(SystemExit) as ended:
        command.main()
    text = ended.value.code
    assert isinstance(text, str)  # which Python prints, and ends with status 1
    assert text.startswith(f"{command.NAME}: ")
    assert "\n" not in text
    return text


CONFIGS = {
    "{": "no checkpoint",
    "[]": "no checkpoint",
    "{}": "model_type",
    '{"model_type": "mamba"}': "mamba",
    '{"model_type": "llama"}': "no checkpoint|expected",
    '{"model_type": ["llama"]}': "no checkpoint|expected",
}


@pytest.mark.parametrize("config", CONFIGS)
def test_wrong_configs_are_refused_in_a_line(monkeypatch, tmp_path, config):
    (tmp_path / "config.json").write_text(config)
    assert re.search(CONFIGS[config], said(monkeypatch, tmp_path))


def test_wrong_folders_are_refused_in_a_line(monkeypatch, tmp_path, folder):
    assert "there is no" in said(monkeypatch, tmp_path / "nowhere")
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "model.safetensors").write_bytes(b"\xff" * 99)
    assert "no checkpoint" in said(monkeypatch, copy)
    config = json.loads((folder / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"vocab_size": 31}))
    with jax.ensure_compile_time_eval():
        save_checkpoint(copy, TINY, init_params(TINY, jax.random.key(0)))
    assert "tokenizer" in said(monkeypatch, copy)


def test_wrong_limits_are_refused_in_a_line(monkeypatch, folder):
    assert "positions" in said(monkeypatch, folder, "--max-seq-len", "9999")
    assert "positions" in said(monkeypatch, folder, "--max-model-len", "66")
    assert "nonsense" in said(monkeypatch, folder, "--backend", "nonsense")
    for size in ("--num-blocks", "--block-size", "--max-seq-len", "--max-seqs"):
        for value in ("-1", "0"):
            name = size[2:].replace("-", "_")
            assert f"{name}={value}" in said(monkeypatch, folder, size, value)


@pytest.mark.skipif(QUICK != "sdpa", reason="no torch, whose sdpa promises no bits")
def test_a_backend_that_does_not_promise_bits_is_refused_in_a_line(monkeypatch, folder):
    asked = ("--batch-invariant", "--backend", QUICK)
    assert "batch_invariant" in said(monkeypatch, folder, *SMALL, *asked)


def test_an_address_that_cannot_be_had_is_told_with_its_option(monkeypatch, folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert re.search(f"{port}.*--port", said(monkeypatch, folder, "--port", port))
    assert "--host" in said(monkeypatch, folder, "--host", "192.0.2.1")
    assert "--host" in said(monkeypatch, folder, "--host", "no.such.name.invalid")


def test_too_little_memory_is_told_in_a_line(monkeypatch, folder):
    def engine(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no 400 GB\nBuffers: ...")

    monkeypatch.setattr(launch, "Engine", engine)
    assert re.search("no 400 GB.*num-blocks", said(monkeypatch, folder))


def test_a_model_of_nan_is_refused_in_a_line(monkeypatch, tmp_path):
    model = replace(TINY, vocab_size=256)
    with jax.ensure_compile_time_eval():
        params = init_params(model, jax.random.key(0))
        save_checkpoint(tmp_path, model, jax.tree.map(lambda tensor: tensor * jnp.nan, params))
    assert "computes NaN" in said(monkeypatch, tmp_path, *SMALL)


SIZES = ("vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("resized", [lambda n: n - 1, lambda n: n + 1, lambda n: 2 * n])
def test_a_config_of_other_sizes_than_the_tensors_is_refused_in_a_line(
    monkeypatch, tmp_path, folder, name, resized
):
    config = json.loads((folder / "config.json").read_text())
    shutil.copy(folder / "model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {name: resized(config[name])}))
    assert re.search("config.json|key must be", said(monkeypatch, tmp_path, *SMALL))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[("port", value) for value in ("-1", "65536", "http")],
        *[("drain", value) for value in ("-1", "inf", "nan", "soon")],
        ("max-requests", "0"),
        *[("allowed-origin", value) for value in ("page.example", "https://page.example/", "null")],
        *[("max-model-len", value) for value in ("1", "long")],
    ],
)
def test_wrong_numbers_are_refused_before_anything_is_loaded(monkeypatch, capsys, option, value):
    monkeypatch.setattr(sys, "argv", [command.NAME, f"--{option}", value])
    monkeypatch.setattr(command, "serve", lambda *_: None)
    with pytest.raises(SystemExit):
        command.main()
    assert re.search(f"argument --{option}: .*{value}", capsys.readouterr().err)


def test_without_the_model_that_comes_with_it_a_folder_must_be_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(arguments, "SHIPPED", tmp_path / "gone")
    monkeypatch.setattr(sys, "argv", [command.NAME])
    with pytest.raises(SystemExit):
        command.main()
    assert "required: DIR" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " ", "a\nb", "é"])
def test_keys_that_no_header_holds_are_refused_and_not_shown(monkeypatch, capsys, key):
    monkeypatch.setattr(sys, "argv", [command.NAME, "--api-key", key])
    monkeypatch.setattr(command, "serve", lambda *_: None)
    with pytest.raises(SystemExit):
        command.main()
    assert "argument --api-key: expected" in (told := capsys.readouterr().err)
    assert not key.strip() or key not in told.partition("argument")[2]


def test_the_longest_text_is_as_asked_or_refused(monkeypatch, folder):
    served = []
    monkeypatch.setattr(sys, "argv", [command.NAME, str(folder), *SMALL, "--max-model-len", "40"])
    monkeypatch.setattr(command, "ready_engine", lambda *_: SimpleNamespace(holdings=lambda: None))
    monkeypatch.setattr(command, "EngineThread", lambda *_: None)
    monkeypatch.setattr(command, "local_app", lambda about, *_, **__: served.append(about))
    monkeypatch.setattr(command, "run", lambda *_: None)
    command.main()
    assert served[0].longest(1) == 40
    sizes = ("--num-blocks", "2", "--block-size", "16", "--max-model-len")
    assert re.search("33 tokens fit.*--num-blocks", said(monkeypatch, folder, *sizes, "34"))


def test_it_serves_and_ends_in_order(folder):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*COMMAND, str(folder), *SMALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    url = process.stdout.readline().decode().split()[-1]
    check_a_stream_outlives_sigterm(url, "tiny-bytes", process)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, b"")


MODULES = {
    "pagedattn-serve": "pagedattn_serving",
    "pagedattn-serve-ray": "pagedattn_serving.replicas.command",
}


@pytest.mark.parametrize(("name", "module"), MODULES.items())
def test_a_refusal_is_a_line_and_a_status(tmp_path, name, module):
    """Without Ray, that is what is missing."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", module, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"{name}: ")
    assert ended.stderr.count("\n") == 1
