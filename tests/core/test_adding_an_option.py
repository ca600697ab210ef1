"""How many files an option touches: four are added to a copy of the library, and tried there.

Each patch is all that its kind of option takes. What must hold of it then says `added_options`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "pagedattn", ROOT / "pagedattn_torch", ROOT / "interop" / "pagedattn_interop")
Patch = dict[str, list[tuple[str, str]]]  # file -> texts that stand there, and what replaces them

# logit = scale / temperature * <q, k>, which only xla computes.
NUMBER: Patch = {
    "pagedattn/spec.py": [
        (
            "    alibi_slopes: tuple[float, ...] | None = None\n",
            "    alibi_slopes: tuple[float, ...] | None = None\n"
            "    temperature: float | None = None\n",
        ),
        ('    "scale": _finite,\n', '    "scale": _finite,\n    "temperature": _finite,\n'),
    ],
    "pagedattn/backends/xla/__init__.py": [
        (
            'SUPPORTS = frozenset(\n    {"scale",',
            'SUPPORTS = frozenset(\n    {"temperature", "scale",',
        ),
        ("tiles) * call.scale\n", "tiles) * (call.scale / (call.spec.temperature or 1))\n"),
    ],
    "pagedattn/testing/oracle.py": [
        (
            "score = scale * product(head.query, head.keys.T)",
            "score = scale / (spec.temperature or 1) * product(head.query, head.keys.T)",
        ),
    ],
    "pagedattn/testing/features.py": [
        ('    "plain": {},\n', '    "plain": {},\n    "temperature": {"temperature": 0.5},\n'),
    ],
}

# A factor on the results of each query head, done around any backend.
KEYWORDS = [
    ("    bias: Bias | None = None,\n", "    bias: Bias | None = None,\n    out_scale=None,\n"),
    ('"bias": bias,', '"bias": bias, "out_scale": out_scale,'),
]
ARRAY: Patch = {
    "pagedattn/_dispatch/options.py": [
        ("    bias: A | None\n", "    bias: A | None\n    out_scale: A | None\n"),
        (
            "_HIDES = ",
            "def _out_scale(scale, query):\n"
            '    an_array("out_scale", scale)\n'
            "    if not (scale.shape == query.shape[1:2] and is_floating(scale.dtype)):\n"
            '        raise InvalidInputError(f"out_scale must be [num_heads], got {scale}")\n'
            "\n\n"
            "def _with_out_scale(out, lse, scale, live):\n"
            "    wide = wide_dtype(out)\n"
            "    product = as_dtype(out, wide) * as_dtype(scale, wide)[None, :, None]\n"
            "    return _without_padding(as_dtype(product, out.dtype), live), lse\n"
            "\n\n"
            "_HIDES = ",
        ),
        (
            '    "bias": Option(\n',
            '    "out_scale": Option(\n'
            "        lambda scale: True,\n"
            "        _out_scale,\n"
            '        around=Around(None, _with_out_scale, fact="out_scale"),\n'
            "    ),\n"
            '    "bias": Option(\n',
        ),
    ],
    "pagedattn/_dispatch/call.py": [
        (
            "    return_lse: bool = False\n",
            "    out_scale: bool = False\n    return_lse: bool = False\n",
        )
    ],
    "pagedattn/attention.py": KEYWORDS,
    "pagedattn_torch/attention.py": KEYWORDS,
    "pagedattn/testing/features.py": [
        (
            "ARRAYS = {\n",
            "ARRAYS = {\n"
            '    "out_scale": ArrayOption(\n'
            "        lambda sizes: (sizes.num_heads,), lambda rng, array: None\n"
            "    ),\n",
        )
    ],
    "pagedattn/testing/problem.py": [
        (
            "    bias: np.ndarray | None = None\n",
            "    bias: np.ndarray | None = None\n    out_scale: np.ndarray | None = None\n",
        )
    ],
    "pagedattn/testing/oracle.py": [
        ("    bias: np.ndarray\n\n\n", "    bias: np.ndarray\n    factor: float = 1.0\n\n\n"),
        (
            "    parents: np.ndarray | None = None,\n) -> ",
            "    parents: np.ndarray | None = None,\n    out_scale=None,\n) -> ",
        ),
        (
            "seen, sink, added)",
            "seen, sink, added, 1 if out_scale is None else out_scale[h])",
        ),
        ("selection, parents\n", "selection, parents, out_scale\n"),
        ("product(probability, head.values)", "product(probability, head.values) * head.factor"),
    ],
}

# What the values of a KV head, of any dtype, are multiplied by when they are read.
CACHE: Patch = {
    "pagedattn/cache/kv_cache.py": [
        (
            '    value_dim: int | None = field(default=None, metadata={"static": True})\n',
            '    value_dim: int | None = field(default=None, metadata={"static": True})\n'
            '    value_gain: Any = field(default=None, metadata={"quantised": False})\n',
        )
    ],
    "pagedattn/cache/quantise.py": [
        (
            "    made = {}\n",
            "    made = {}\n"
            "    key, *value = rows\n"
            "    if cache.value_gain is not None and cache.value is not None:\n"
            "        value = [new / cache.value_gain.reshape(-1, 1) for new in value]\n"
            "    rows = (key, *value)\n",
        )
    ],
    "pagedattn/_dispatch/options.py": [
        (
            "_HIDES = ",
            "def _out_with_gain(out, lse, cache, live):\n"
            "    return scaled(out, cache.value_gain, cache.num_kv_heads), lse\n"
            "\n\n"
            "_HIDES = ",
        ),
        (
            "OF_CACHES: dict[str, OfCache] = {\n",
            "OF_CACHES: dict[str, OfCache] = {\n"
            '    "value_gain": OfCache(("value_gain",), Around(None, _out_with_gain)),\n',
        ),
    ],
    "pagedattn/testing/features.py": [
        (
            "# Dtypes of caches that",
            "def _with_gain(problem, _yes):\n"
            "    heads = problem.key_cache.shape[2]\n"
            "    return problem.replace(value_gain=np.resize(np.float32([3, 0.5]), heads))\n"
            "\n\n"
            "# Dtypes of caches that",
        ),
        (
            '    "value_dim": _with_columns,\n',
            '    "value_dim": _with_columns,\n    "value_gain": _with_gain,\n',
        ),
        ('    "plain": {},\n', '    "plain": {},\n    "value_gain": {"value_gain": True},\n'),
        ('all": EVERY | {', 'all": EVERY | {"value_gain": True, '),
    ],
    "pagedattn/testing/problem.py": [
        (
            "    value_dim: int | None = None\n",
            "    value_dim: int | None = None\n    value_gain: np.ndarray | None = None\n",
        )
    ],
    "pagedattn/testing/oracle.py": [
        (
            "    parents: np.ndarray | None = None,\n) -> ",
            "    parents: np.ndarray | None = None,\n    value_gain=None,\n) -> ",
        ),
        (
            "        p, j = standing(query_len, seq_len, family)\n",
            "        if value_gain is not None:\n"
            "            values = values * value_gain[:, None]\n"
            "        p, j = standing(query_len, seq_len, family)\n",
        ),
        ("selection, parents\n", "selection, parents, value_gain\n"),
    ],
}
# Caches in eight bits of another dtype, which the kernels do not read.
DTYPE: Patch = {
    "pagedattn/cache/quantise.py": [
        ("LARGEST = {", 'LARGEST = {"float8_e4m3b11fnuz": 30.0, '),
    ],
    "pagedattn/testing/features.py": [
        (
            '    "plain": {},\n',
            '    "plain": {},\n    "b11": {"cache_dtype": "float8_e4m3b11fnuz"},\n',
        ),
    ],
}
PATCHES = {"number": (NUMBER, 5), "array": (ARRAY, 7), "cache": (CACHE, 6), "dtype": (DTYPE, 6)}


@pytest.mark.parametrize("kind", PATCHES)
def test_an_option_is_a_few_lines_in_a_few_files(kind, tmp_path):
    patch, most_files = PATCHES[kind]
    assert len(patch) <= most_files
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(package, tmp_path / package.name, ignore=ignored)
    for file, changes in patch.items():
        path = tmp_path / file
        text = path.read_text()
        for old, new in changes:
            assert old in text, f"{file} has no longer: {old}"
            text = text.replace(old, new)
        path.write_text(text)
    script = Path(__file__).with_name("added_options.py")
    path = str(tmp_path), os.environ.get("PYTHONPATH", "")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script), kind],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
