"""flash-attn-4's backend: on the CPU with a stand-in that keeps to its rules; on a GPU itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cases import SPECS, mixed
from flash_rules import TILES, Forward
from hypothesis import given
from pagedattn_interop import to_torch
from pagedattn_interop.backends import bridged

from pagedattn import AttentionSpec, BackendUnavailableError, KVCache, explain, paged_attention
from pagedattn._dispatch import registry
from pagedattn._dispatch.call import call_of
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem, strategies
from pagedattn_torch import arrays
from pagedattn_torch.backends import flash
from pagedattn_torch.backends.flash.forward import PACKAGE, why_unusable

HALF = jnp.dtype("float16")
HONOURED = ("plain", "scale", "sliding_window", "logits_soft_cap", "causal=False")
FLASH_SPECS = {name: SPECS[name] for name in HONOURED} | {
    "window 1": AttentionSpec(sliding_window=1),
    "wide window": AttentionSpec(sliding_window=500),
    "two-sided window": AttentionSpec(causal=False, sliding_window=4),
    "all": AttentionSpec(scale=0.4, sliding_window=9, logits_soft_cap=2.0),
}
PHASES = {
    "decode": {"query_lens": [1, 1, 0, 1, 0], "seq_lens": [17, 1, 5, 300, 0], "max_query_len": 1},
    "mixed": {"query_lens": [20, 1, 3, 70], "seq_lens": [33, 17, 3, 200], "max_query_len": 80},
    "more queries than keys": {"query_lens": [170, 3, 0, 5], "seq_lens": [4, 9, 5, 0]},
}
SIZES = {"block_size": 16, "head_dim": 64, "dtype": HALF}
on_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] not in flash.HEAD_DIMS
    or bool(why_unusable()),
    reason=f"needs a Hopper or Blackwell GPU and {PACKAGE}",
)  # fmt: skip


@pytest.fixture
def stand_in(monkeypatch):
    forward = Forward()
    monkeypatch.setattr(flash, "forward", lambda: forward)
    return forward


def problem_of(phase, spec=SPECS["plain"], **kwargs):
    lens = dict(PHASES[phase])
    tokens = sum(lens["query_lens"]) + 3
    return random_problem(
        lens.pop("query_lens"), lens.pop("seq_lens"), spec,
        **lens, **SIZES | {"pad_tokens": tokens} | kwargs,
    )  # fmt: skip


def inputs(problem, device="cpu"):
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    query, cache, batch = to_torch((query, cache, batch))
    planes = (plane.to(device) for plane in cache.planes)
    return query.to(device), KVCache(*planes), arrays.batch_on(batch, device)


def run(problem, *, return_lse=True, device="cpu"):
    """out and lse, written to memory full of NaN."""
    query, cache, batch = inputs(problem, device)
    options = {name: torch.from_numpy(array).to(device) for name, array in problem.arrays.items()}
    call = call_of(query, cache, batch, problem.spec, return_lse, **options)
    assert flash.BACKEND.why_not(call) == []
    room = query.new_full(call.out_shape, torch.nan)
    plan = flash.plan(call, batch)
    out, lse = flash.run(call, query, cache, plan, out=(room, None), **options)
    assert out.data_ptr() == room.data_ptr()
    return out.float().cpu().numpy(), lse.cpu().numpy() if return_lse else None


@pytest.mark.parametrize("block_size", [4, 16, 128])
@pytest.mark.parametrize("name", FLASH_SPECS)
@pytest.mark.parametrize("phase", PHASES)
def test_against_the_oracle(stand_in, phase, name, block_size):
    """With NaN in every slot that no query sees, and -1 in tables past the sequences."""
    problem = problem_of(phase, FLASH_SPECS[name], block_size=block_size)
    assert_attention_close(*run(problem), problem)
    assert stand_in.seen


@pytest.mark.parametrize("name", ["plain", "sliding_window", "causal=False"])
@pytest.mark.parametrize("phase", PHASES)
def test_sinks_are_its_own(stand_in, phase, name):
    """Also of tokens that see no key, but not of padding."""
    problem = problem_of(phase, FLASH_SPECS[name], arrays=["sinks"])
    assert_attention_close(*run(problem), problem)
    assert "sinks" in flash.SUPPORTS


@given(data=strategies.st.data())
def test_any_batch(data):
    spec = data.draw(strategies.st.sampled_from(list(FLASH_SPECS.values())))
    bucket = strategies.BUCKETS[0]._replace(head_dim=64)
    problem = data.draw(strategies.problems(bucket=bucket, spec=spec, dtype=np.float16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "forward", Forward)
        assert_attention_close(*run(problem), problem)


@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("name", ["plain", "sliding_window"])
def test_no_page_is_as_long_as_a_tile(stand_in, name, head_dim):
    """Such a page is loaded whole, and what lies in its unused slots spreads."""
    for block_size in {size for tiles in TILES.values() for size in tiles} | {160}:
        problem = problem_of("mixed", FLASH_SPECS[name], block_size=block_size, head_dim=head_dim)
        assert_attention_close(*run(problem), problem)
    assert {size for size, *_ in stand_in.seen} <= set(range(flash.SHORT))


def test_the_cache_is_read_in_place(stand_in):
    for block_size, name in ((16, "plain"), (128, "plain"), (16, "sliding_window")):
        problem = problem_of("mixed", FLASH_SPECS[name], block_size=block_size)
        query, cache, batch = inputs(problem)
        call = call_of(query, cache, batch, problem.spec)
        flash.run(call, query, cache, flash.plan(call, batch))
        assert stand_in.seen[-1][1:3] == (cache.key.data_ptr(), cache.value.data_ptr())


def test_garbage_in_a_batch_leads_nowhere(stand_in):
    """Inside jit nobody has checked it; the stand-in raises at what would be out of bounds."""
    for name in ("plain", "sliding_window", "two-sided window"):
        problem = problem_of("mixed", FLASH_SPECS[name])
        query, cache, batch = inputs(problem)
        call = call_of(query, cache, batch, problem.spec, True)
        rng = np.random.default_rng(0)
        for _ in range(8):
            garbage = {
                name: torch.from_numpy(
                    rng.integers(-999, 999, getattr(batch, name).shape, np.int32)
                )
                for name in ("block_tables", "seq_lens", "query_start_loc")
            }
            wild = dataclasses.replace(batch, **garbage)
            flash.run(call, query, cache, flash.plan(call, wild))
    assert len(stand_in.seen) == 24


@pytest.mark.parametrize("block_size", [4, 128])
@pytest.mark.parametrize("name", ["plain", "sliding_window", "two-sided window"])
@pytest.mark.parametrize("phase", PHASES)
def test_xla_and_torch_plan_alike(phase, name, block_size):
    problem = problem_of(phase, FLASH_SPECS[name], block_size=block_size)
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(query, cache, batch, problem.spec)
    by_xla = flash.plan(call, batch)
    for got, want in zip(by_xla, flash.plan(call, to_torch(batch)), strict=True):
        assert got.dtype == jnp.int32
        assert want.dtype is torch.int32
        np.testing.assert_array_equal(got, want.cpu())


def anywhere(name):
    """The backend for JAX arrays, said to run wherever they lie."""
    return bridged(dataclasses.replace(flash.BACKEND, name=name, missing=list))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("jit", [False, True])
def test_from_jax(stand_in, jit, return_lse):
    """Inside jit the kernels write XLA's own buffer."""
    problem = problem_of("mixed", SPECS["sliding_window"])
    backend = anywhere("stand-in of flash")

    def attend(query, cache, batch):
        options = {"backend": backend, "return_lse": return_lse}
        return paged_attention(query, cache, batch, problem.spec, **options)

    call = jax.jit(attend) if jit else attend
    rows = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    results = call(*rows)
    out, lse = results if return_lse else (results, None)
    assert_attention_close(np.asarray(out), lse if lse is None else np.asarray(lse), problem)
    assert stand_in.seen[-1][3] == out.unsafe_buffer_pointer()


def test_gradients_are_the_xla_backends(stand_in):
    problem = problem_of("mixed", dtype=HALF)
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)

    def loss(query, backend):
        out = paged_attention(query, cache, batch, problem.spec, backend=backend)
        return (out.astype(jnp.float32) ** 2).sum()

    got, want = (jax.grad(loss)(query, b) for b in (anywhere("stand-in of flash"), "xla"))
    live = slice(0, sum(problem.query_lens))  # the padding rows are NaN
    np.testing.assert_allclose(
        np.asarray(got[live], np.float32), np.asarray(want[live], np.float32), atol=0.05, rtol=0.05
    )


REFUSED = {
    "head_dim": ({"head_dim": 24}, "head_dim"),
    "float32": ({"dtype": np.float32}, "float32"),
    "alibi": ({"spec": SPECS["alibi_slopes"]}, "alibi_slopes"),
    "bias": ({"arrays": ["bias"]}, "bias"),
    "quantised": ({"cache_dtype": "int8"}, "cache_dtype"),
    "narrow values": ({"value_dim": 32}, "value_dim"),
    "latent": ({"value_dim": 32, "latent": True}, "value_dim"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_by_name(name):
    kwargs, word = REFUSED[name]
    problem = problem_of("decode", **kwargs)
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(query, cache, batch, problem.spec, **problem.arrays)
    assert word in " ".join(flash.BACKEND.why_not(call))


def strided(problem, change):
    query, cache, batch = inputs(problem)
    cache = KVCache(*(change(plane) for plane in cache.planes))
    return " ".join(flash.refusals(call_of(query, cache, batch, problem.spec)))


def test_refuses_caches_that_would_be_copied():
    wide = problem_of("decode", head_dim=128)
    narrow, odd = (lambda x: x[..., ::2]), (lambda x: torch.nn.functional.pad(x, (0, 3))[..., :-3])
    assert "strides" in strided(wide, narrow)
    assert "strides" in strided(wide, odd)
    assert strided(wide, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)) == ""
    between = lambda x: torch.stack([x, x], 1)[:, 0]  # noqa: E731  (a block of each in turn)
    assert strided(wide, between) == ""
    for kwargs in ({"block_size": 128}, {"spec": SPECS["sliding_window"]}):
        assert "follow one another" in strided(problem_of("decode", **kwargs), between)


def test_it_runs_only_when_it_is_named():
    assert flash.BACKEND.why_passed_over(call_of(*inputs(mixed()), AttentionSpec()))
    problem = problem_of("decode")
    rows = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    why = explain(*rows, problem.spec)
    assert why.choice != "flash"
    if jax.default_backend() == "cpu":
        assert "runs on cuda" in why["flash"][0]


@pytest.mark.skipif(not why_unusable(), reason=f"{PACKAGE} is installed")
def test_says_what_installs_it():
    for framework in registry.Framework:
        with pytest.raises(BackendUnavailableError, match=r"pip install 'pagedattn\[flash\]'"):
            registry.load("flash", framework)


@on_gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", FLASH_SPECS)
@pytest.mark.parametrize("phase", PHASES)
def test_kernels_against_the_oracle(phase, name, dtype):
    for block_size, head_dim in ((16, 64), (128, 128), (5, 128)):
        sizes = {"block_size": block_size, "head_dim": head_dim}
        problem = problem_of(phase, FLASH_SPECS[name], dtype=jnp.dtype(dtype), **sizes)
        assert_attention_close(*run(problem, device="cuda"), problem, name=f"flash {sizes}")


@on_gpu
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("name", ["plain", "sliding_window", "causal=False"])
def test_head_sizes_of_the_kernels(head_dim, name):
    if head_dim not in flash.HEAD_DIMS[torch.cuda.get_device_capability()[0]]:
        pytest.skip("refused on this GPU")
    for heads in (2, 6):
        problem = problem_of("mixed", FLASH_SPECS[name], head_dim=head_dim, num_heads=heads)
        assert_attention_close(*run(problem, device="cuda"), problem)


@on_gpu
@pytest.mark.parametrize("phase", PHASES)
def test_sinks_of_the_kernels(phase):
    problem = problem_of(phase, arrays=["sinks"])
    assert_attention_close(*run(problem, device="cuda"), problem)


@on_gpu
@pytest.mark.parametrize("name", FLASH_SPECS)
def test_kernels_inside_jit(name):
    """Several in a program, so that XLA captures them."""
    problem = problem_of("mixed", FLASH_SPECS[name])

    @jax.jit
    def layers(query, cache, batch):
        options = {"backend": "flash", "return_lse": True}
        return [paged_attention(query, cache, batch, problem.spec, **options) for _ in range(6)]

    rows = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    for _ in range(3):
        for out, lse in layers(*rows):
            assert_attention_close(np.asarray(out), np.asarray(lse), problem)
