"""Two processes, each of two devices of a CPU or of a GPU of its own.

They give the tokens of one process, and one that loses the other ends.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import jax
import multi_process as example
import pytest
from jax.sharding import Mesh
from pagedattn_serving.checkpoint.folder import load_checkpoint, save_checkpoint
from pagedattn_serving.checkpoint.tokenizer import BYTES
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.parallel import tensor
from pagedattn_serving.training.initial import large_params
from tiny import TINY

HEARTBEAT = 20  # seconds; a busy machine may keep a process from its turn for ten
LIMIT = 600  # seconds of a test, on a busy machine
ON_GPUS = jax.default_backend() == "gpu"
pytestmark = pytest.mark.skipif(
    jax.device_count() != (2 if ON_GPUS else 1), reason="starts processes by itself, or on two GPUs"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny model of bytes."""
    folder, model = tmp_path_factory.mktemp("tiny"), replace(TINY, vocab_size=256)
    params = large_params(model, jax.random.key(0))
    save_checkpoint(folder, model, params)
    return folder


@contextmanager
def coordinator():
    """An address that stays ours: nobody else is given a port while a socket is bound to it."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # gRPC binds to it so too
        reserved.bind(("localhost", 0))
        yield f"localhost:{reserved.getsockname()[1]}"


def environment_of(process: int) -> dict[str, str]:
    """Of a process, which on GPUs sees one of them, and has to multiply as exactly as this one."""
    own = {"CUDA_VISIBLE_DEVICES": str(process), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    own |= {"JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    common = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return common | own if ON_GPUS else common


@pytest.fixture
def start(checkpoint):
    """Starts two processes at a call; none of them outlives the test, nor the limit."""
    started = []

    def kill():
        for process in started:
            process.kill()

    def both(*options):
        command = [
            sys.executable,
            example.__file__,
            f"--coordinator={ends.enter_context(coordinator())}",
        ]
        command += ["--processes=2", f"--cpu-devices={0 if ON_GPUS else 2}"]
        command += [f"--model={checkpoint}", "--prompts=1", "--new-tokens=6", *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        pair = [
            subprocess.Popen([*command, f"--process={i}"], env=environment_of(i), **pipes)
            for i in range(2)
        ]
        started.extend(pair)
        return pair

    timer = threading.Timer(LIMIT, kill)
    timer.start()
    with ExitStack() as ends:
        yield both
        timer.cancel()
        kill()
        for process in started:
            process.wait()
            process.stdout.close()


@pytest.fixture(scope="module")
def answer(checkpoint):
    """What one process says."""
    model, params = load_checkpoint(checkpoint)
    mesh, prompts = Mesh(jax.devices()[:1], tensor.AXIS), [BYTES.encode(PROMPTS[0])]
    sizes = {"max_new_tokens": 6, "num_blocks": 256}
    with jax.default_matmul_precision("highest"):
        (tokens,) = tensor.generate(mesh, model, params, prompts, **sizes)
    return repr(BYTES.decode(tokens))


def test_both_say_what_one_process_says(start, answer):
    for process in start():
        text = process.communicate()[0]
        assert process.returncode == 0, text
        assert re.findall(r"-> (.*)$", text, re.MULTILINE) == [answer], text


def test_who_loses_the_other_ends_with_an_error(start, answer):
    """Of a process that is killed the connections close; of one that hangs no heartbeat comes."""
    options = "--rounds=1000000", f"--heartbeat={HEARTBEAT}"
    killed, hanging = start(*options), start(*options)  # both at once: the test mostly waits
    others = lose(killed, 1, signal.SIGKILL, answer), lose(hanging, 0, signal.SIGSTOP, answer)
    for other in others:
        text = other.communicate(timeout=HEARTBEAT + LIMIT)[0]  # the rest is for a busy machine
        assert other.returncode != 0
        assert "another task died" in text


def lose(processes, lost, how, answer):
    """The process that is left, of two that have answered."""
    other = processes[1 - lost]
    answers = (line for line in other.stdout if "->" in line)
    assert next(answers).rstrip().endswith(f"-> {answer}")
    processes[lost].send_signal(how)
    return other
