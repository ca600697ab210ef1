"""Cases of the Mosaic kernels in processes of their own, by JAX's GPU interpreter."""

import re
import shutil
from pathlib import Path

import jax
import pytest
from forked import run_forked
from mosaic_bugs import BUGS
from mutants import files_with

ROOT = Path(__file__).parents[2]
HERE = str(Path(__file__).parent)
LEAST = 0, 12
interpreted = pytest.mark.skipif(
    jax.__version_info__ < LEAST,
    reason=f"JAX {jax.__version__} interprets too little: 0.12 and Python 3.12 are needed",
)
CODE = """
import sys
sys.path[:0] = sys.argv[1:4]
import mosaic_interpreter
from mosaic_cases import CASES, check_all
check_all(CASES[sys.argv[4]], int(sys.argv[5]))
"""


def run_case(name: str, examples: int = 0, *, root: Path = ROOT, seconds: int = 600):
    """Checks a case, and as many lengths that are drawn, with the library that lies in `root`."""
    argv = str(root), HERE, str(Path(HERE).parent), name, str(examples)
    return run_forked(CODE, "jax", "hypothesis", argv=argv, seconds=seconds)


def check_case(name: str, examples: int, seconds: int = 600) -> None:
    done = run_case(name, examples, seconds=seconds)
    assert done.returncode == 0, done.stderr[-4000:]


def check_bug(name: str, root: Path) -> None:
    """A copy of the library with the bug, made in `root`, fails as it should."""
    bug = BUGS[name]
    shutil.copytree(
        ROOT / "pagedattn", root / "pagedattn", ignore=shutil.ignore_patterns("__pycache__")
    )
    (file,) = (root / path.relative_to(ROOT) for path in files_with(bug.text, ROOT))
    file.write_text(file.read_text().replace(bug.text, bug.mistake))
    done = run_case(bug.case, root=root)
    print(done.stderr[-3000:])
    assert done.returncode == 1
    assert re.search(bug.caught, done.stderr)
