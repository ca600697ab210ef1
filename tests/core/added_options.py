"""What must hold of an option that `test_adding_an_option` adds: run in a process on the copy.

`python added_options.py number|array|cache|dtype`: temperature, a field of the spec, which xla
alone supports; out_scale, an array that any backend has; value_gain, a field of caches; a dtype of
caches that the kernels do not read.
"""

import inspect
import sys

import jax
import jax.numpy as jnp
import numpy as np

import pagedattn as pa
from pagedattn import testing
from pagedattn._dispatch import registry
from pagedattn._dispatch.registry import Framework, can_load
from pagedattn.testing import assert_attention_close, batch_of, cache_of, tolerances
from pagedattn.testing.harness import Cell, cell_problem, run_cell

SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4}
BACKENDS = [n for n in registry.names(Framework.JAX) if can_load(n)]
# Each copy would compile numba anew, for a minute and more.
HERE = [
    name
    for name in BACKENDS
    if name != "numba" and not registry.wrong_device(name, jax.devices()[0].platform)
]
TORCH = can_load("sdpa", Framework.TORCH)
ANY = {"xla", "sdpa"} & {*HERE}


def problem_of(feature, phase="mixed"):
    return cell_problem(Cell(feature, phase, "float32", ""), SIZES)


def result_of(backend, feature, phase="mixed"):
    return run_cell(backend, Cell(feature, phase, "float32", ""), jit=False, sizes=SIZES)


def hold_that_it_matters(feature, **without):
    problem = problem_of(feature)
    out, _ = tolerances.reference(problem)
    other, _ = tolerances.reference(problem.replace(**without))
    assert np.abs(out - other).max() > 0.1


def hold_by_torch(feature):
    """paged_attention on tensors, and a prepared step, give what the oracle gives."""
    import pagedattn_interop

    import pagedattn_torch

    problem = problem_of(feature)
    arrays = jax.tree.map(jnp.asarray, problem.arrays)
    tree = jnp.asarray(problem.query), cache_of(problem), arrays
    query, cache, arrays = pagedattn_interop.to_torch(tree, copy=True)
    call, batch = (query, cache, batch_of(problem), problem.spec), batch_of(problem)
    options = {"backend": "sdpa", "return_lse": True, **arrays}
    got = pagedattn_torch.paged_attention(*call, **options)
    assert_attention_close(*got, problem, name="sdpa")
    step = pagedattn_torch.prepare(query, cache, batch, problem.spec, **options)
    assert_attention_close(*step.attend(query, cache, **arrays), problem, name="a step")
    return query, cache, batch, problem.spec


def refused(function, *args, error=pa.InvalidInputError, **options) -> str:
    try:
        function(*args, **options)
    except error as raised:
        return str(raised)
    raise AssertionError(f"{function} took {options}")


def number():
    hold_that_it_matters("temperature", spec=pa.AttentionSpec())
    for phase in ("mixed", "decode", "cross"):
        assert result_of("xla", "temperature", phase) == "ok"
    others = [name for name in HERE if name != "xla"]
    for name in others:
        expected = f"temperature: {name} does not have it"
        result = result_of(name, "temperature")
        assert result.startswith("refused"), result
        assert expected in result, result
    if TORCH:
        import pagedattn_torch

        call = jax.tree.map(np.asarray, (problem_of("plain").query, cache_of(problem_of("plain"))))
        query, cache = _tensors(call)
        batch, spec = batch_of(problem_of("plain")), problem_of("temperature").spec
        reasons = pagedattn_torch.explain(query, cache, batch, spec)
        assert reasons.choice is None
        for name in (n for n in registry.names(Framework.TORCH) if can_load(n, Framework.TORCH)):
            if not registry.wrong_device(name, "cpu"):
                assert reasons[name] == [f"temperature: {name} does not have it"], reasons[name]
    return others


def _tensors(tree):
    import torch

    return jax.tree.map(lambda array: torch.from_numpy(np.array(array)), tree)


def array():
    hold_that_it_matters("out_scale", out_scale=None)
    ran = [name for name in HERE if result_of(name, "out_scale") == "ok"]
    assert {*ran} >= ANY, ran
    for name in {*HERE} - {*ran}:  # the library does it around any
        assert "out_scale" not in result_of(name, "out_scale")
    assert result_of("xla", "all") == "ok"
    problem = problem_of("out_scale")
    call = jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec
    wrong = {"out_scale": jnp.ones(3)}
    for function in (pa.paged_attention, pa.explain, pa.select_backend):
        assert "out_scale must be" in refused(function, *call, **wrong)
        assert "out_scale" in inspect.signature(function).parameters
    refused(pa.explain, *call, error=TypeError, no_option=None)
    if TORCH:
        import pagedattn_torch

        call = hold_by_torch("out_scale")
        for function in (pagedattn_torch.paged_attention, pagedattn_torch.prepare):
            assert "out_scale must be" in refused(function, *call, out_scale=call[0].new_ones(3))
    scale = jnp.asarray(problem.out_scale)
    call = jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec

    def summed(scale):
        return pa.paged_attention(*call, backend="xla", out_scale=scale).sum()

    plain = pa.paged_attention(*call, backend="xla").sum((0, 2))
    np.testing.assert_allclose(jax.grad(summed)(scale), plain, rtol=1e-4, atol=1e-4)
    return ran


def cache():
    hold_that_it_matters("value_gain", value_gain=None)
    ran = [name for name in HERE if result_of(name, "value_gain") == "ok"]
    assert {*ran} >= ANY, ran
    assert result_of("xla", "all") == result_of("xla", "latent, all") == "ok"
    gain, other = jnp.array([2.0, 0.5]), jnp.array([2.0, 4.0])
    empty = jnp.zeros((2, 4, 2, 8))
    make = pa.KVCache
    new = jax.random.normal(jax.random.key(0), (2, 3, 2, 8))
    written = pa.write_kv(make(empty, empty, value_gain=gain), *new, jnp.array([1, 4, 6]))
    np.testing.assert_allclose(written.value[0, 1] * gain[:, None], new[1, 0], rtol=1e-6)
    np.testing.assert_array_equal(written.value_gain, gain)
    ids = jnp.array([0]), jnp.array([1])
    np.testing.assert_array_equal(pa.copy_blocks(written, *ids).value_gain, gain)
    refusal = refused(pa.swap_blocks, written, make(empty, empty, value_gain=other), *ids)
    assert "agree in value_gain" in refusal
    for wrong in (jnp.ones(3), jnp.zeros(2)):
        bad = make(empty, empty, value_gain=wrong)
        assert "value_gain must be" in refused(pa.write_kv, bad, *new, jnp.array([1, 4, 6]))
    if TORCH:
        import pagedattn_torch

        hold_by_torch("value_gain")
        tensors = _tensors((make(empty, empty, value_gain=gain), *new))
        pages = pagedattn_torch.write_kv_(*tensors, np.array([1, 4, 6]))
        np.testing.assert_allclose(pages.value, written.value, rtol=1e-6)
    return ran


def dtype():
    results = {name: result_of(name, "b11") for name in HERE}
    assert results.pop("xla") == "ok"
    assert all(result.startswith("refused") for result in results.values()), results
    assert "float8_e4m3b11fnuz" in testing.features.CACHE_DTYPES
    return results


if __name__ == "__main__":
    CHECKS = {"number": number, "array": array, "cache": cache, "dtype": dtype}
    print(*CHECKS[sys.argv[1]]())
