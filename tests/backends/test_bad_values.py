r"""Bad ids, lengths and starts, which only the device knows in jit: no backend leaves its arrays.

Here they are only seen to end. What they touch is seen by CUDA's memory checker:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 XLA_PYTHON_CLIENT_ALLOCATOR=platform \
    XLA_FLAGS="--xla_gpu_force_compilation_parallelism=1 --xla_gpu_autotune_level=0" \
    compute-sanitizer --tool memcheck --show-backtrace no --error-exitcode 1 \
        python -m pytest -p no:benchmark -k bad_values \
        tests/backends/test_bad_values.py tests/backends/test_triton_gpu.py \
        tests/core/test_errors.py

The variables give every array an allocation of its own, so that stepping over its end is an error.
The flags are for the checker, which crashes where several threads compile; its backtraces hold on
to Python's frames, and so to tensors that XLA must have back.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedattn import AttentionSpec, explain, write_kv
from pagedattn._dispatch.registry import can_load
from pagedattn.testing import batch_of, cache_of, random_problem
from pagedattn.testing.running import attend_in_jit

NAMES = ("xla", "sdpa", "numba", "triton", "mosaic", "xformers", "cudnn", "flash")
NAMES = [name for name in NAMES if can_load(name)]
HUGE, FAR = 2**31 - 1, 10**6
SIZES = {"dtype": np.dtype("float16"), "head_dim": 64, "block_size": 16, "poison": None}
DECODE, CHUNKS = [1, 1, 1], [40, 1, 3]
WINDOW = AttentionSpec(sliding_window=20)
CALLS = {
    "decode": (DECODE, AttentionSpec(), {}),
    "decode in a window": (DECODE, WINDOW, {}),
    "decode and padding": (DECODE, AttentionSpec(), {"pad_tokens": 80}),  # more than max_query_len
    "chunks": (CHUNKS, AttentionSpec(), {}),
    "chunks in a window": (CHUNKS, WINDOW, {}),
    "decode from eight bits": (DECODE, AttentionSpec(), {"cache_dtype": "float8_e5m2"}),
    "decode from latents": (DECODE, AttentionSpec(), {"value_dim": 32, "latent": True}),
}
# field: values in place of those of the three sequences
BAD = {
    "huge ids": {"block_tables": np.full((3, 6), HUGE)},
    "ids past the end": {"block_tables": np.full((3, 6), 99)},
    "negative ids": {"block_tables": np.full((3, 6), -(2**31))},
    "long sequences": {"seq_lens": [FAR, HUGE, 97]},
    "negative lengths": {"seq_lens": [-1, -FAR, -(2**31)]},
    "starts past the end": {"query_start_loc": [0, FAR, FAR, HUGE]},
    "negative starts": {"query_start_loc": [-5, -(2**31), -1, 3]},
    "falling starts": {"query_start_loc": [3, 2, 1, 0]},
    "late starts": {"query_start_loc": [FAR, FAR + 1, FAR + 2, FAR + 3]},
    "everything": {
        "block_tables": np.full((3, 6), 99),
        "seq_lens": [FAR, FAR, FAR],
        "query_start_loc": [-5, 30, FAR, 7],
    },
}


@functools.cache
def arguments(name):
    query_lens, spec, cache = CALLS[name]
    problem = random_problem(query_lens, [90, 50, 7], spec, **SIZES, **cache)
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem), spec


@functools.cache
def reasons(name):
    """Why each backend refuses a call."""
    return explain(*arguments(name))


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", NAMES)
def test_bad_values_in_jit(name, call, bad):
    query, cache, batch, spec = arguments(call)
    if refused := reasons(call)[name]:
        pytest.skip("; ".join(refused))
    fields = {field: jnp.asarray(values, jnp.int32) for field, values in BAD[bad].items()}
    batch = dataclasses.replace(batch, **fields)
    out, lse = attend_in_jit(query, cache, batch, spec, backend=name, return_lse=True)
    shape = (*query.shape[:2], cache.value_dim or cache.head_dim)
    assert jax.block_until_ready(out).shape == shape
    assert jax.block_until_ready(lse).shape == shape[:2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bad_values_are_not_written(dtype):
    _, cache, *_ = arguments("decode")
    cache = jax.tree.map(lambda plane: plane.astype(dtype), cache)
    slots = jnp.array([-1, -2, -(2**31), cache.num_slots, cache.num_slots + 5, HUGE], jnp.int32)
    new = jnp.ones((len(slots), cache.num_kv_heads, cache.head_dim), dtype)
    got = jax.jit(write_kv)(cache, new, new, slots)
    jax.tree.map(np.testing.assert_array_equal, got, cache)
