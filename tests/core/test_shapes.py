"""The annotations say what the functions take: tests run again under jaxtyping's import hook.

In a process of its own, since the hook sees only what is imported after it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

beartype = pytest.importorskip("beartype", reason="beartype, which reads annotations, is missing")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT, "pagedattn"), (ROOT, "pagedattn_torch"), (ROOT / "interop", "pagedattn_interop")
LEFT_OUT = {
    "pagedattn.backends.numba": "Numba compiles its source",
    "pagedattn._kernels.triton.attention": "Triton compiles its source",
    "pagedattn._kernels.cpu": "Numba compiles its source",
    "pagedattn._kernels.triton.eight_bits": "Triton compiles its source",
    "pagedattn._kernels.triton.merge": "Triton compiles its source",
    "pagedattn._kernels.triton.pages": "Triton compiles its source",
    "pagedattn._kernels.triton.tile": "Triton compiles its source",
    "pagedattn._kernels.triton.online_softmax": "Triton compiles its source",
    "pagedattn._dispatch.signatures": "beartype cannot read Unpack of a generic TypedDict",
    "pagedattn.testing.strategies": "beartype cannot read Hypothesis' DrawFn",
    "pagedattn_torch.layers.metadata.attention_metadata": "beartype cannot read typing.Self",
}
# Some tests of every kind of function, in half a minute.
TESTS = [
    "tests/core/test_across.py",
    "tests/core/test_batch.py",
    "tests/core/test_cache.py",
    "tests/core/test_state.py",
    "tests/core/test_visibility.py",
    "tests/backends/test_torch.py",
    "tests/interop/test_interop.py",
    "tests/layers/test_torch_layout.py",
    "tests/layers/test_torch_prepared.py",
    "tests/pool/test_pool.py",
    "--deselect=tests/pool/test_pool.py::TestPool",  # a random walk: minutes
    "--deselect=tests/pool/test_pool.py::test_numbers_beyond_int32_do_not_wrap",  # another process
]
WRONG = """
import numpy as np
from pagedattn.batch.indices import in_range

def test_wrong():
    in_range(np.zeros(3), 4)  # floats, where ids are integers
"""


# What the hook applies to each function. Sizes may be NumPy's integers where they may be Python's.
whole_numbers = beartype.FrozenDict({int: int | np.integer})
checked = beartype.beartype(conf=beartype.BeartypeConf(hint_overrides=whole_numbers))


def modules() -> list[str]:
    """Those that are checked. A package stands for all in it, so not if some of it is left out."""
    files = [
        file.relative_to(source)
        for source, name in PACKAGES
        for file in source.glob(f"{name}/**/*.py")
    ]
    names = {".".join(file.with_suffix("").parts).removesuffix(".__init__") for file in files}
    return sorted(name for name in names if not any(_overlap(name, out) for out in LEFT_OUT))


def _overlap(name: str, other: str) -> bool:
    """Whether one of two modules is the other, or lies in it."""
    return f"{other}.".startswith(f"{name}.") or name.startswith(f"{other}.")


def run_hooked(*arguments) -> subprocess.CompletedProcess:
    """pytest under the hook, which conftest.py spares the tests of errors."""
    option = f"--jaxtyping-packages={','.join([*modules(), 'test_shapes.checked'])}"
    without = "-p", "no:cacheprovider", "-p", "no:benchmark"
    command = [sys.executable, "-m", "pytest", "-q", *without, option]
    # beartype looks at one entry of a list, chosen at random: inside Hypothesis' strategies, too.
    command += ["-W", "ignore:Do not use the `random` module", *map(str, arguments)]
    environment = os.environ | {"HYPOTHESIS_PROFILE": "few"}  # types hardly depend on values
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.early
def test_annotations_say_what_functions_take(tmp_path):
    """In the same run a test whose annotations are wrong fails, and no other."""
    (tmp_path / "test_wrong.py").write_text(WRONG)
    done = run_hooked("-c", ROOT / "pyproject.toml", *TESTS, tmp_path / "test_wrong.py")
    assert re.search(r"^1 failed, \d{3} passed", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^FAILED \S*::test_wrong - \S*TypeCheckError", done.stdout, re.MULTILINE)
