"""`batch_invariant`: the bits of a token's results are the same in whatever batch it comes."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
from cases import good_call, lacks
from hypothesis import given, settings
from hypothesis import strategies as st
from rearranged import Call, Layout, Piece, bits, calls, differing, prompts
from supporting import backends_with, backends_without

import pagedattn as pa
from pagedattn._dispatch import registry
from pagedattn._dispatch.backend import LACKS
from pagedattn._dispatch.call import call_of
from pagedattn._dispatch.registry import Framework
from pagedattn.backends.xla import BACKEND as XLA
from pagedattn.testing import (
    assert_attention_close,
    batch_of,
    cache_of,
    check_backend,
    random_problem,
)
from pagedattn.testing.features import OPTIONS, PHASES
from pagedattn.testing.harness import Cell, cell_problem, run_cell
from pagedattn.testing.running import attend

IN_ORDER = [name for name, has in OPTIONS.items() if "parents" not in has]  # which all refuse
EXAMPLES = {Framework.JAX: 10, Framework.TORCH: 20}  # in JAX a call is a program
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "block_size": 4}


every_backend = pytest.mark.parametrize(("framework", "name"), backends_with("batch_invariant"))


def solver(framework, name, batch_invariant=True):
    """`solve(problem, jit)` gives out and lse by a backend, in numpy."""
    options = {"backend": name, "batch_invariant": batch_invariant}
    if framework is Framework.TORCH:
        from tensors import by_torch

        return lambda problem, _jit=False: by_torch(problem, **options)
    return lambda problem, jit=True: [np.asarray(x) for x in attend(problem, jit=jit, **options)]


def check_other_batches(framework, name, data):
    alike = [name for name in IN_ORDER if "selection" not in OPTIONS[name]]  # whose blocks differ
    known = [options for options in alike if not lacks(name, options, framework)]
    problem = data.draw(prompts(known))
    wrong = differing(problem, data.draw(calls(problem)), solver(framework, name))
    assert not wrong, "\n".join(wrong)


@every_backend
def test_other_batches_give_the_same_bits(framework, name):
    @settings(settings(), max_examples=EXAMPLES[framework])
    @given(data=st.data())
    def check(data):
        check_other_batches(framework, name, data)

    check()


def test_the_property_sees_a_backend_without_the_mode():
    """A decode, whose tile and table are smaller than its prompt's, by xla as it is by default."""
    problem = random_problem([60], [600], pa.AttentionSpec(), head_dim=64, block_size=16)
    layout = Layout(5, 1, 0, 0, 0, 0, np.nan, 0)
    decode = [Call([Piece(0, 59, 60)], layout, jit=False)]
    assert differing(problem, decode, solver(Framework.JAX, "xla", batch_invariant=False))
    assert not differing(problem, decode, solver(Framework.JAX, "xla"))


@every_backend
def test_sinks_leave_a_token_the_same_bits_alone_and_among_others(framework, name):
    """Where they are left to torch: the last elements of an array are no vector there."""
    sizes = SIZES | {"num_heads": 1, "num_kv_heads": 1, "arrays": ["sinks"], "seed": 1}
    problem = random_problem([1] * 40, [4] * 40, pa.AttentionSpec(), **sizes)
    layout = Layout(4, 0, 0, 0, 0, 0, np.nan, 0)
    calls = [Call([Piece(seq, 0, 1)], layout, jit=False) for seq in range(40)]
    assert not differing(problem, calls, solver(framework, name))


@every_backend
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("options", IN_ORDER)
def test_results_are_right(framework, name, options, phase):
    if lacking := lacks(name, options, framework):
        pytest.skip(f"{name} lacks {', '.join(lacking)}")
    problem = cell_problem(Cell(options, phase, "bfloat16", ""), SIZES)
    assert_attention_close(*solver(framework, name)(problem), problem, name=name)


def steps_on_a_pool(attend):
    """Results of two tokens in their prompt, after a fork, beside others, and after a swap.

    `attend(query, cache, batch)` gives out and lse.
    """
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((30, h, 16)), "float32") for h in (4, 2, 2)
    )
    pool, host = (pa.init_block_pool(30, 4, max_seqs=4, max_blocks=9) for _ in range(2))
    cache, host_cache = (pa.init_kv_cache(30, 4, 2, 16, "float32") for _ in range(2))
    pool, _ = pa.append_tokens(pool, jnp.array([0, 21, 9, 0]))
    batch = pa.batch_from_pool(pool, jnp.array([0, 21, 9, 0]), num_tokens=30, max_query_len=21)
    cache = pa.write_kv(cache, key, value, batch.slot_mapping)
    last = functools.partial(pa.batch_from_pool, num_tokens=2, max_query_len=2)
    yield [x[19:21] for x in attend(query, cache, batch)]

    pool, _ = pa.fork(pool, jnp.array([1]), jnp.array([3]))
    pool, _ = pa.release(pool, jnp.array([1]))
    yield attend(query[19:21], cache, last(pool, jnp.array([0, 0, 0, 2])))

    pool, host, swap = pa.swap_out(pool, host, jnp.array([3]), jnp.array([2]))
    host_cache = pa.swap_blocks(cache, host_cache, swap.src, swap.dst)
    pool, _ = pa.append_tokens(pool, jnp.array([5, 0, 7, 0]))
    yield attend(query[19:21], host_cache, last(host, jnp.array([0, 0, 2, 0])))

    pool, host, swap = pa.swap_in(pool, host, jnp.array([2]), jnp.array([1]))
    cache = pa.swap_blocks(host_cache, cache, swap.src, swap.dst)
    yield attend(query[19:21], cache, last(pool, jnp.array([0, 2, 0, 0])))


@every_backend
def test_after_fork_and_swap_the_bits_are_the_same(framework, name):
    options = {"backend": name, "batch_invariant": True, "return_lse": True}

    def attend(query, cache, batch):
        if framework is Framework.JAX:
            return [np.asarray(x) for x in pa.paged_attention(query, cache, batch, **options)]
        from tensors import tensors

        import pagedattn_torch

        arrays = tensors((query, cache))
        return [x.cpu().numpy() for x in pagedattn_torch.paged_attention(*arrays, batch, **options)]

    first, *others = steps_on_a_pool(attend)
    for results in others:
        for got, want in zip(results, first, strict=True):
            np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("backend", backends_without("batch_invariant"))
def test_others_refuse_it_by_name(backend):
    query, cache, batch, spec = good_call()
    call = call_of(query, cache, batch, spec, batch_invariant=True)
    device = next(iter(registry.BUILT_IN[backend.name].devices), call.device)
    call = dataclasses.replace(call, device=device)
    assert backend.why_not(call) == [f"batch_invariant: {backend} {LACKS}"]


def test_a_named_backend_without_it_is_not_asked():
    name = "sdpa" if registry.can_load("sdpa") else pytest.skip("sdpa needs torch")
    with pytest.raises(pa.UnsupportedError, match=f"batch_invariant: {name} {LACKS}"):
        pa.paged_attention(*good_call(), backend=name, batch_invariant=True)


def choice(framework, problem) -> str:
    arrays = jnp.asarray(problem.query), cache_of(problem)
    select = pa.select_backend
    if framework is Framework.TORCH:
        from tensors import tensors

        import pagedattn_torch

        arrays, select = tensors(arrays), pagedattn_torch.select_backend
    return select(*arrays, batch_of(problem), batch_invariant=True)


LENGTHS = (([1] * 3, [1, 20, 700]), ([3, 1], [9, 40]), ([500], [700]))  # decodes, drafts, prompts


@pytest.mark.parametrize("framework", Framework)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 16), (4, 128), (32, 128)])
def test_one_backend_for_decodes_and_prompts(framework, num_heads, head_dim):
    """Which of two is faster depends on lengths, and with another one the bits would."""
    if framework is Framework.TORCH:
        pytest.importorskip("torch")
    sizes = {"num_heads": num_heads, "head_dim": head_dim}
    problems = [random_problem(*lens, pa.AttentionSpec(), **sizes) for lens in LENGTHS]
    if framework not in [param.values[0] for param in backends_with("batch_invariant")]:
        with pytest.raises(pa.UnsupportedError, match=f"batch_invariant: sdpa {LACKS}"):
            choice(framework, problems[0])
    else:
        assert len({choice(framework, problem) for problem in problems}) == 1


def test_check_backend_asks_for_it():
    asked = []

    def run(call, *arrays, **options):
        asked.append(call.batch_invariant)
        return XLA.run(call, *arrays, **options)

    cell, spy = Cell("plain", "decode", "float32", ""), dataclasses.replace(XLA, run=run)
    for flag in (True, False):
        assert run_cell(spy, cell, jit=False, sizes=SIZES, batch_invariant=flag) == "ok"
    assert asked == [True, False]
    without = dataclasses.replace(XLA, supports=XLA.supports - {"batch_invariant"})
    with pytest.raises(AssertionError, match="refused every cell"):
        check_backend(without, dtypes=["float32"], batch_invariant=True, verbose=False)
