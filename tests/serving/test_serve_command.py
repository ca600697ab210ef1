"""`examples/serve.py` as a command: what it refuses, and how it ends."""

import json
import os
import re
import subprocess
import sys

import jax
import pytest
import serve
from http_server import check_a_stream_outlives_sigterm
from serving.checkpoint import save_checkpoint
from serving.initial import init_params
from tiny import TINY, saved_tiny

COMMAND = [sys.executable, serve.__file__]
SMALL = ["--port", "0", "--num-blocks", "16", "--max-seqs", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved_tiny(tmp_path_factory.mktemp("tiny") / "tiny-bytes")


def said(monkeypatch, *args):
    """What the command says when it refuses."""
    monkeypatch.setattr(sys, "argv", ["serve.py", "--port", "0", *map(str, args)])
    with pytest.raises(SystemExit) as ended:
        serve.main()
    text = ended.value.code
    assert isinstance(text, str)  # which Python prints, and ends with status 1
    assert text.startswith("serve.py: ")
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
    assert "nonsense" in said(monkeypatch, folder, "--backend", "nonsense")
    for size in ("--num-blocks", "--block-size", "--max-seq-len", "--max-seqs"):
        assert f"{size[2:].replace('-', '_')}=-1" in said(monkeypatch, folder, size, "-1")


@pytest.mark.parametrize(
    ("option", "value"),
    [("port", "-1"), ("port", "65536"), ("port", "http"), ("max-requests", "0")],
)
def test_wrong_numbers_are_refused_before_anything_is_loaded(monkeypatch, capsys, option, value):
    monkeypatch.setattr(sys, "argv", ["serve.py", f"--{option}", value])
    with pytest.raises(SystemExit):
        serve.main()
    assert re.search(f"argument --{option}: .*{value}", capsys.readouterr().err)


def test_it_serves_and_ends_in_order(folder):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*COMMAND, str(folder), *SMALL], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env
    )
    url = process.stdout.readline().decode().split()[-1]
    check_a_stream_outlives_sigterm(url, "tiny-bytes", process)
    _, errors = process.communicate(timeout=300)
    assert (process.returncode, errors) == (0, b"")


def test_a_refusal_is_a_line_and_a_status(tmp_path):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, env=env)
    assert ended.returncode == 1
    assert ended.stderr.startswith("serve.py: ")
    assert ended.stderr.count("\n") == 1
