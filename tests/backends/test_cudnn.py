"""The cudnn backend: its arithmetic on the CPU with a stand-in kernel, and the kernel on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, mixed, replace_spec
from hypothesis import given

from pagedattn import AttentionSpec, UnsupportedError, explain, paged_attention
from pagedattn._dispatch.call import call_of
from pagedattn.backends import cudnn
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem, strategies

HAS_GPU = jax.default_backend() == "gpu"
on_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")
CAUSAL = {name: SPECS[name] for name in ("plain", "scale", "sliding_window", "causal=False")} | {
    "window 1": AttentionSpec(sliding_window=1),
    "wide window": AttentionSpec(sliding_window=500),
}

# A GPU would multiply float32 as TF32 by default.
einsum = functools.partial(jnp.einsum, precision="highest")


def stand_in(call, query, key, value, lens, *, causal=True, with_lse=True):
    """What cuDNN computes, and NaN in all that it leaves undefined."""
    window, scale = call.window if causal else None, call.scale
    width, keys = query.shape[1], key.shape[1]
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (key, value))
    logits = scale * einsum("bqhd,bkhd->bhqk", query.astype(jnp.float32), key)
    row, column = jnp.arange(width)[:, None], jnp.arange(keys)[None]
    seen = (column <= row) if causal else column >= 0
    if window is not None:
        seen &= column > row - window
    seen = jnp.broadcast_to(seen, logits.shape)
    if lens is not None:
        seen &= column < lens[1][:, None, None, None]
        seen &= row < lens[0][:, None, None, None]
    logits = jnp.where(seen, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=3)
    out = einsum("bhqk,bkhd->bqhd", jnp.exp(logits - lse[..., None]), value)
    lse = jnp.where(jnp.isneginf(lse), jnp.nan, lse).swapaxes(1, 2)
    return out.astype(query.dtype), lse if with_lse else None


def packed_stand_in(query, key, value, queries, keys, *, causal, scale, with_lse):
    """The same of packed sequences."""
    seqs, rows = rows_of(queries, len(query))
    key_seqs, columns = rows_of(keys, len(key))
    group = query.shape[1] // key.shape[1]
    key, value = (jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (key, value))
    logits = scale * einsum("qhd,khd->hqk", query.astype(jnp.float32), key)
    seen = (seqs[:, None] == key_seqs) & (seqs >= 0)[:, None]
    seen &= (columns <= rows[:, None]) if causal else True
    logits = jnp.where(seen, logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=2)
    out = einsum("hqk,khd->qhd", jnp.exp(logits - lse[..., None]), value)
    by_row = jnp.full((len(queries.lens), query.shape[1], len(query)), jnp.nan)
    by_row = by_row.at[jnp.where(seqs >= 0, seqs, 9999), :, rows].set(lse.T, mode="drop")
    by_row = jnp.where(jnp.isneginf(by_row), jnp.nan, by_row)
    return out.astype(query.dtype), by_row if with_lse else None


def rows_of(spans, count):
    """The sequence of each row of a packed axis, -1 for none, and its number there."""
    numbers = jnp.arange(count) - spans.starts[:, None]
    inside = (numbers >= 0) & (numbers < spans.lens[:, None])
    seqs = jnp.where(inside.any(0), inside.argmax(0), -1)
    return seqs, jnp.where(inside, numbers, 0).sum(0)


@pytest.fixture(params=["rectangles", "packed"])
def by_stand_in(request, monkeypatch):
    """`cudnn.run` without cuDNN: undefined rows and 0 * NaN come out as NaN."""
    with_stand_ins(monkeypatch, request.param)

    def attend(problem, return_lse=True):
        arrays = arrays_of(problem)
        return jitted_run(request.param)(call_of(*arrays, problem.spec, return_lse), *arrays)

    return attend


def arrays_of(problem):
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem)


def with_stand_ins(monkeypatch, layout):
    monkeypatch.setattr(cudnn.rectangles, "_kernel", stand_in)
    monkeypatch.setattr(cudnn.packed, "kernel", packed_stand_in)
    monkeypatch.setattr(cudnn, "_packs", lambda call: layout == "packed")


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixed_batches(by_stand_in, name, dtype):
    """Prefill, chunk, decode, an empty query, a padding sequence, unowned memory full of NaN."""
    problem = mixed(CAUSAL[name], dtype=jnp.dtype(dtype))
    assert_attention_close(*by_stand_in(problem), problem)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("seq_lens", [[12, 12], [30, 12], [30, 21]])
def test_full_rectangles(by_stand_in, name, seq_lens):
    """Whole prompts of one length take the short way; the same shapes with a context must not."""
    tables = np.random.default_rng(0).permutation(16).reshape(2, 8)
    problem = random_problem(
        [12, 12], seq_lens, CAUSAL[name], max_query_len=12, num_blocks=16, block_tables=tables
    )
    assert_attention_close(*by_stand_in(problem), problem)
    out, lse = by_stand_in(problem, return_lse=False)
    assert lse is None
    assert_attention_close(out, None, problem)


def test_fewer_keys_than_queries(by_stand_in):
    """Cross attention, causal and not: queries before the first key see nothing."""
    for name in ("plain", "sliding_window", "causal=False"):
        problem = random_problem([7, 3, 0, 5], [4, 9, 5, 0], CAUSAL[name], max_query_len=8)
        assert_attention_close(*by_stand_in(problem), problem)


@given(data=strategies.st.data(), layout=strategies.st.sampled_from(["rectangles", "packed"]))
def test_any_batch(data, layout):
    spec = data.draw(strategies.st.sampled_from(list(CAUSAL.values())))
    problem = data.draw(strategies.problems(spec=spec))
    arrays = arrays_of(problem)
    call = call_of(*arrays, problem.spec, True)
    if call.is_empty:  # not given to backends
        return
    with pytest.MonkeyPatch.context() as patch:
        with_stand_ins(patch, layout)
        out, lse = jitted_run(layout)(call, *arrays)
    assert_attention_close(out, lse, problem)


@functools.cache
def jitted_run(layout):
    """One function for all tests: they share programs."""

    def run(*args):
        return cudnn.run.__wrapped__(*args)

    return jax.jit(run, static_argnums=0)


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        (SPECS["alibi_slopes"], "alibi_slopes"),
        (SPECS["logits_soft_cap"], "logits_soft_cap"),
        (AttentionSpec(causal=False, sliding_window=3), "sliding_window"),
    ],
)
def test_refuses_by_name(monkeypatch, spec, word):
    monkeypatch.setattr(cudnn, "_missing", list)
    problem = mixed(spec, dtype=jnp.dtype("bfloat16"))
    reasons = cudnn.BACKEND.why_not(call_of(*arrays_of(problem), spec))
    assert any(word in reason for reason in reasons)


def test_refuses_float32_and_odd_heads(monkeypatch):
    monkeypatch.setattr(cudnn, "_missing", list)
    problem = random_problem([3], [3], SPECS["plain"], head_dim=12)
    reasons = " ".join(cudnn.refusals(call_of(*arrays_of(problem), problem.spec)))
    assert "float32" in reasons
    assert "head_dim" in reasons


def slower_because(query_lens, seq_lens, spec=SPECS["plain"], **kwargs):
    shapes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "block_size": 64}
    problem = random_problem(query_lens, seq_lens, spec, **shapes, **kwargs)
    return " ".join(cudnn.slower_because(call_of(*arrays_of(problem), spec)))


def test_is_chosen_for_long_queries_of_like_lengths():
    assert slower_because([8192, 8000], [8192, 8192]) == ""
    assert slower_because([2048], [16384], max_query_len=2048) == ""
    assert slower_because([6000], [6000], pad_tokens=8192) == ""
    assert slower_because([8192], [8192], AttentionSpec(sliding_window=1024)) == ""


def test_is_not_chosen_where_gathering_costs_more():
    assert "short" in slower_because([1] * 8, [900] * 8)
    assert "short" in slower_because([128] * 4, [500] * 4)
    assert "little work" in slower_because([2048], [2048])
    assert "mixed" in slower_because([6000] + [1] * 8, [6000] + [500] * 8)
    assert "window" in slower_because([2048], [20000], AttentionSpec(sliding_window=9000))


def test_jax_still_has_what_we_call():
    """It is not public: jax.nn's function gives the lse in the query's dtype only."""
    assert cudnn.kernel.missing() == []
    assert callable(cudnn.kernel._cudnn.dot_product_attention)
    assert {"CAUSAL", "PADDING", "PADDING_CAUSAL"} <= set(cudnn.kernel._cudnn.MaskType.__members__)


@pytest.mark.parametrize("layout", ["rectangles", "packed"])
def test_it_lowers_with_vmap(monkeypatch, layout):
    """Some arguments mapped, others not; JAX asks a GPU and its libraries for their versions."""
    monkeypatch.setattr(cudnn.kernel._cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn.kernel._cudnn, "check_compute_capability", lambda version: True)
    same = "is_cuda_compute_capability_equal"
    monkeypatch.setattr(cudnn.kernel._cudnn, same, lambda version: version == "9.0")
    monkeypatch.setattr(cudnn, "_packs", lambda call: layout == "packed")
    problem = mixed(dtype=jnp.dtype("bfloat16"))
    query, cache, batch = arrays_of(problem)
    call = call_of(query, cache, batch, problem.spec, return_lse=True)
    run = jax.vmap(functools.partial(cudnn.run.__wrapped__, call), (0, None, None))
    arrays = jnp.stack([query, query]), cache, batch
    out, lse = jax.eval_shape(run, *arrays)
    assert (out.shape, lse.shape) == ((2, *call.out_shape), (2, *call.lse_shape))
    program = jax.jit(run).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert "__cudnn$fmha" in program


@pytest.mark.usefixtures("on_cpu")
def test_says_what_it_needs_on_a_cpu():
    problem = mixed(dtype=jnp.dtype("bfloat16"))
    assert "runs on cuda" in " ".join(explain(*arrays_of(problem), problem.spec)["cudnn"])


@on_gpu
@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_kernel_against_the_oracle(name, dtype):
    for problem in (
        mixed(CAUSAL[name], dtype=jnp.dtype(dtype)),
        random_problem(
            [130, 257, 1], [400, 257, 70], CAUSAL[name], block_size=16, head_dim=64,
            max_query_len=300, pad_tokens=400, dtype=jnp.dtype(dtype),
        ),
        random_problem([96, 96], [96, 96], CAUSAL[name], block_size=16, head_dim=128,
            max_query_len=96, dtype=jnp.dtype(dtype)),
    ):  # fmt: skip
        arrays = arrays_of(problem)
        out, lse = paged_attention(*arrays, problem.spec, backend="cudnn", return_lse=True)
        assert_attention_close(out, lse, problem, name="cudnn")


@on_gpu
@pytest.mark.parametrize("layout", ["rectangles", "packed"])
@pytest.mark.parametrize("query_lens", [[130, 0, 257, 1, 7], [300]])
def test_both_layouts(layout, query_lens, monkeypatch):
    monkeypatch.setattr(cudnn, "_packs", lambda call: layout == "packed")
    run = jax.jit(cudnn.run.__wrapped__, static_argnums=0)
    for contexts in ([0] * 5, [77, 9, 0, 300, -3]):
        seq_lens = [n + c for n, c in zip(query_lens, contexts, strict=False)]
        problem = random_problem(
            query_lens, seq_lens, SPECS["plain"], block_size=16, head_dim=128, pad_tokens=420,
            max_query_len=300, dtype=jnp.dtype("bfloat16"),
        )  # fmt: skip
        arrays = arrays_of(problem)
        call = call_of(*arrays, problem.spec, True)
        assert_attention_close(*run(call, *arrays), problem, name=layout)


@on_gpu
def test_gradient():
    problem = mixed(dtype=jnp.dtype("bfloat16"), poison=None)
    cache, batch = cache_of(problem), batch_of(problem)

    def total(query, backend):
        return paged_attention(query, cache, batch, backend=backend).astype(jnp.float32).sum()

    got, want = (jax.grad(total)(jnp.asarray(problem.query), name) for name in ("cudnn", "xla"))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=0.05)


@on_gpu
def test_named_backend_never_falls_back():
    problem = replace_spec(mixed(dtype=jnp.dtype("bfloat16")), logits_soft_cap=3.0)
    arrays = arrays_of(problem)
    with pytest.raises(UnsupportedError, match="logits_soft_cap"):
        paged_attention(*arrays, problem.spec, backend="cudnn")
