"""xFormers' backend: masks and routes on the CPU with a stand-in kernel; the kernels on a GPU."""

import dataclasses
import sys
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("xformers", reason="pip install --no-deps xformers==0.0.35")

from cases import SPECS, mixed
from hypothesis import given
from pagedattn_interop import to_torch, torch_call
from pagedattn_interop.backends import bridged

from pagedattn import AttentionSpec, KVCache
from pagedattn._arrays.namespace import cdiv
from pagedattn._dispatch import registry
from pagedattn._dispatch.call import call_of
from pagedattn.cache import quantise
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem, strategies
from pagedattn_torch import arrays, explain, paged_attention
from pagedattn_torch.backends import sdpa
from pagedattn_torch.backends import xformers as kernels
from pagedattn_torch.backends.gather import gather_pages
from pagedattn_torch.backends.xformers.fmha import (
    RUNTIME_PACKAGE,
    fmha,
    hidden_flash_attn,
    why_unusable,
)

HALF = jnp.dtype("float16")
ROUTED = {name: spec for name, spec in SPECS.items() if spec.logits_soft_cap is None} | {
    "window 1": AttentionSpec(sliding_window=1),
    "two-sided window": AttentionSpec(causal=False, sliding_window=4),
    "wide window": AttentionSpec(sliding_window=500),
}
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
# pages of 16 are read in place, others gathered
DECODE = {"query_lens": [1, 1, 0, 1, 0], "seq_lens": [17, 1, 5, 40, 0], "max_query_len": 1}
VERIFY = {"query_lens": [4, 1, 0, 3], "seq_lens": [20, 1, 9, 2], "max_query_len": 4}
CHUNKS = {"query_lens": [20, 1, 3], "seq_lens": [33, 17, 3], "max_query_len": 32}
PHASES = {"decode": DECODE, "verify": VERIFY, "chunks": CHUNKS}


def problem_of(phase, spec, dtype=HALF, **kwargs):
    lens = dict(PHASES[phase])
    tokens = sum(lens["query_lens"]) + 2
    kwargs = {"block_size": 16, "pad_tokens": tokens, "dtype": dtype} | kwargs
    return random_problem(lens.pop("query_lens"), lens.pop("seq_lens"), spec, **lens, **kwargs)


def inputs(problem, device="cpu"):
    call = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    query, cache, batch = to_torch(call)
    planes = (cache.key.to(device), cache.value.to(device))
    return query.to(device), type(cache)(*planes), arrays.batch_on(batch, device)


def known(info):
    """Python lengths put back where the mask was made without them: to materialise it."""
    lens = {"seqlen_py": info.seqlen.tolist()} if hasattr(info, "seqlen") else {}
    return dataclasses.replace(info, seqstart_py=info.seqstart.tolist(), **lens)


def sequences(mask):
    """For each sequence its rows, the keys that are loaded for it, and the bias between them."""
    infos = {name: known(getattr(mask, name)) for name in ("q_seqinfo", "k_seqinfo")}
    paged = hasattr(mask, "block_tables")
    flat = mask._UNPAGED_TYPE(**infos) if paged else dataclasses.replace(mask, **infos)
    queries, keys = (info.seqstart_py for info in infos.values())
    bias = flat.materialize((queries[-1], keys[-1]), device=torch.device("cpu"))
    for seq, length in enumerate(infos["k_seqinfo"].seqlen_py):
        rows = slice(queries[seq], queries[seq + 1])
        if paged:
            j = torch.arange(length)
            blocks = mask.block_tables[seq, j // mask.page_size]
            slots = blocks * mask.page_size + j % mask.page_size
            yield rows, slots.long(), bias[rows, keys[seq] : keys[seq] + length]
        else:
            loaded = torch.arange(keys[seq], keys[seq + 1])
            yield rows, loaded, bias[rows, loaded]


def attend(query, key, value, added, scale):
    """`[..., rows, dim]` on `[..., keys, dim]`: NaN for rows without keys, 0 * NaN is NaN."""
    logits = query @ key.mT * scale + added
    lse = logits.logsumexp(dim=-1)
    return torch.exp(logits - lse[..., None]) @ value, lse


def stand_in(op, call, query, key, value, mask):
    """What the operators compute, and NaN or +inf where they leave things undefined."""
    assert query.dtype == key.dtype == value.dtype
    shape, scale = query.shape, call.scale
    query, key, value = (x.flatten(2, -2).transpose(1, 2).float() for x in (query, key, value))
    if isinstance(mask, torch.Tensor):
        out, lse = attend(query, key, value, mask.float(), scale)
    else:
        out, lse = torch.full_like(query, torch.nan), query.new_full(query.shape[:3], torch.nan)
        for rows, keys, added in sequences(mask):
            planes = query[:, :, rows], key[:, :, keys], value[:, :, keys]
            out[:, :, rows], lse[:, :, rows] = attend(*planes, added, scale)
    lse = torch.where(lse == -torch.inf, torch.inf, lse).unflatten(1, shape[2:-1])
    return out.transpose(1, 2).reshape(shape), lse


def run(problem, monkeypatch, return_lse=True):
    monkeypatch.setattr(kernels, "_attend", stand_in)
    arrays = inputs(problem)
    options = {name: torch.from_numpy(array) for name, array in problem.arrays.items()}
    call = call_of(*arrays, problem.spec, return_lse, **options)
    out, lse = kernels.run(call, *arrays, **options)
    return out.float().numpy(), lse.float().numpy() if return_lse else None


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("phase", PHASES)
def test_routes_and_masks_against_the_oracle(monkeypatch, name, phase):
    problem = problem_of(phase, ROUTED[name])
    assert_attention_close(*run(problem, monkeypatch), problem)


@pytest.mark.parametrize("name", ["plain", "alibi_slopes", "two-sided window"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_bias_and_heads_whose_keys_it_hides(monkeypatch, name, phase):
    problem = problem_of(phase, ROUTED[name], arrays=["bias"])
    assert_attention_close(*run(problem, monkeypatch), problem)


CACHES = ("float8_e4m3fn", "float8_e5m2", "int8")


def quantised(problem, dtype, device="cpu"):
    """Inputs with a quantised cache, and the problem of what it holds."""
    query, cache, batch = inputs(problem, device)
    scales = torch.tensor(0.03125, device=device), torch.tensor([0.0625, 0.25], device=device)
    planes = [quantise.quantised(plane.float().nan_to_num(), getattr(torch, dtype), scale)
              for plane, scale in zip(cache.planes, scales, strict=True)]  # fmt: skip
    held = [plane.float() * scale.view(-1, 1) for plane, scale in zip(planes, scales, strict=True)]
    names = ("key_cache", "value_cache")
    held = {name: plane.cpu().numpy() for name, plane in zip(names, held, strict=True)}
    return (query, KVCache(*planes, *scales), batch), problem.replace(**held)


@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("name", ["plain", "sliding_window", "alibi_slopes"])
@pytest.mark.parametrize("phase", PHASES)
def test_quantised_caches(monkeypatch, phase, name, dtype):
    """Gathered and converted: no kernel reads them in place."""
    monkeypatch.setattr(kernels, "_attend", stand_in)
    monkeypatch.setattr(registry, "wrong_device", lambda name, device: [])
    backend = dataclasses.replace(kernels.BACKEND, missing=list)
    arrays, held = quantised(problem_of(phase, ROUTED[name]), dtype)
    out, lse = paged_attention(*arrays, held.spec, backend=backend, return_lse=True)
    assert_attention_close(out.float().numpy(), lse.numpy(), held)


@on_gpu
@pytest.mark.parametrize("dtype", CACHES)
@pytest.mark.parametrize("name", ["plain", "sliding_window", "alibi_slopes"])
@pytest.mark.parametrize("phase", PHASES)
def test_quantised_caches_on_a_gpu(phase, name, dtype):
    arrays, held = quantised(problem_of(phase, ROUTED[name]), dtype, "cuda")
    out, lse = paged_attention(*arrays, held.spec, backend="xformers", return_lse=True)
    assert_attention_close(out.float().cpu().numpy(), lse.cpu().numpy(), held)


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("max_query_len", [8, 32])
def test_more_queries_than_keys(monkeypatch, name, max_query_len):
    problem = random_problem(
        [7, 3, 0, 5], [4, 9, 5, 0], ROUTED[name],
        max_query_len=max_query_len, block_size=16, dtype=HALF,
    )  # fmt: skip
    assert_attention_close(*run(problem, monkeypatch), problem)


def early_queries(causal):
    """The first of ten queries on three keys stands at -7, beyond a window wider than the table."""
    spec = AttentionSpec(causal=causal, sliding_window=5)
    return random_problem([10], [3], spec, max_query_len=16, dtype=HALF)


@pytest.mark.parametrize("causal", [True, False])
def test_early_queries_see_nothing_through_a_wide_window(monkeypatch, causal):
    problem = early_queries(causal)
    assert_attention_close(*run(problem, monkeypatch), problem)


@on_gpu
@pytest.mark.parametrize("causal", [True, False])
def test_early_queries_see_nothing_on_a_gpu(causal):
    problem = early_queries(causal)
    arrays = inputs(problem, "cuda")
    out, lse = kernels.run(call_of(*arrays, problem.spec, return_lse=True), *arrays)
    assert_attention_close(out.float().cpu().numpy(), lse.cpu().numpy(), problem)


@given(data=strategies.st.data())
def test_any_batch(data):
    spec = data.draw(strategies.st.sampled_from(list(ROUTED.values())))
    problem = data.draw(
        strategies.problems(bucket=strategies.BUCKETS[0], spec=spec, dtype=np.float16)
    )
    with pytest.MonkeyPatch.context() as patch:
        assert_attention_close(*run(problem, patch), problem)


def route(phase, spec=SPECS["plain"], dtype=HALF, **kwargs):
    return kernels.route(call_of(*inputs(problem_of(phase, spec, dtype, **kwargs)), spec))


def test_the_route_is_chosen_by_shapes():
    assert route("decode") == route("verify") == "paged"
    assert route("decode", block_size=64) == "paged"
    assert route("decode", block_size=8) == "packed"
    assert route("decode", head_dim=24) == "packed"
    assert route("decode", SPECS["sliding_window"]) == "packed"
    assert route("chunks") == route("chunks", SPECS["sliding_window"]) == "packed"
    assert route("chunks", ROUTED["two-sided window"]) == "biased"
    assert route("decode", SPECS["alibi_slopes"]) == "biased"
    assert route("decode", dtype=jnp.dtype("float32")) == "biased"


def splits(num_seqs, capacity, block_size):
    problem = random_problem(
        [1], [1], SPECS["plain"],
        num_heads=8, num_kv_heads=8, head_dim=8, block_size=block_size, dtype=HALF,
    )  # fmt: skip
    sizes = {"num_tokens": num_seqs, "num_seqs": num_seqs, "max_blocks": cdiv(capacity, block_size)}
    operator = kernels._split_k(
        dataclasses.replace(call_of(*inputs(problem), problem.spec), **sizes)
    )
    return operator.BLOCK_N, operator.SPLIT_K


def test_blocks_of_keys_divide_a_page():
    sizes = {16: 16, 32: 32, 48: 16, 64: 64, 128: 64, 192: 64}
    assert {size: splits(1, 5, size)[0] for size in sizes} == sizes


def test_splits_fill_the_gpu():
    assert splits(64, 4096, 64)[1] == 1
    assert splits(16, 2048, 64)[1] == 4
    assert splits(64, 16384, 64)[1] == 4  # one long sequence among many must not stand alone
    assert splits(1, 16384, 64)[1] == 64
    assert splits(8, 512, 64)[1] == 2
    assert splits(1, 64, 64)[1] == 1


def test_two_sided_windows_stay_two_sided(monkeypatch):
    """xFormers' make_local_attention would make the mask causal."""
    problem = problem_of("chunks", ROUTED["two-sided window"])
    out, _ = run(problem, monkeypatch)
    causal, _ = run(problem.replace(spec=AttentionSpec(sliding_window=4)), monkeypatch)
    assert not np.allclose(out[:20], causal[:20], atol=0.1)


def test_a_window_gathers_only_what_it_shows():
    query, cache, batch = inputs(problem_of("decode", SPECS["plain"], num_blocks=99))
    for window, blocks in ((None, batch.max_blocks), (1, 1), (2, 2), (17, 2), (18, 3)):
        call = call_of(query, cache, batch, AttentionSpec(sliding_window=window))
        assert call.visible_blocks == gather_pages(call, cache, batch).key.shape[1] // 16 == blocks


@pytest.mark.usefixtures("on_cpu")
def test_refuses_by_name():
    problem = mixed(SPECS["logits_soft_cap"])
    arrays = inputs(problem)
    assert "runs on cuda" in explain(*arrays, problem.spec)["xformers"][0]
    assert "logits_soft_cap" in kernels.BACKEND.why_not(call_of(*arrays, problem.spec))[0]
    odd = random_problem([2], [2], SPECS["plain"], head_dim=12)
    assert "head_dim" in " ".join(kernels.refusals(call_of(*inputs(odd), odd.spec)))


def test_says_which_package_is_missing(monkeypatch):
    monkeypatch.setattr(fmha().common, "_built_with_cuda", False)
    assert RUNTIME_PACKAGE in " ".join(why_unusable())


@pytest.mark.parametrize("parts", ["cute", "cute flash_attn_interface"])
def test_flash_attn_4_is_hidden_from_xformers(monkeypatch, tmp_path, parts):
    for part in parts.split():
        (tmp_path / "flash_attn" / part).mkdir(parents=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with hidden_flash_attn():
        assert (find_spec("flash_attn") is None) == (parts == "cute")
    assert find_spec("flash_attn.cute")


@on_gpu
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kernels_against_the_oracle(name, phase, dtype):
    for block_size, head_dim in ((16, 16), (4, 24), (64, 128), (32, 64)):
        shapes = {"block_size": block_size, "head_dim": head_dim}
        problem = problem_of(phase, ROUTED[name], jnp.dtype(dtype), **shapes)
        query, cache, batch = inputs(problem, "cuda")
        options = {"backend": "xformers", "return_lse": True}
        out, lse = paged_attention(query, cache, batch, problem.spec, **options)
        out, lse = out.float().cpu().numpy(), lse.cpu().numpy()
        assert_attention_close(out, lse, problem, name=f"xformers {shapes}")


@on_gpu
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("phase", PHASES)
def test_inside_jit(name, phase):
    problem = problem_of(phase, ROUTED[name])
    run = jax.jit(bridged(kernels.BACKEND).run, static_argnums=0)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(*arrays, problem.spec, return_lse=True)
    for _ in range(2):
        assert_attention_close(*run(call, *arrays), problem, name="xformers in jit")


@on_gpu
@pytest.mark.parametrize("backend", [kernels.BACKEND, sdpa.BACKEND], ids=["xformers", "sdpa"])
@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("phase", PHASES)
def test_captured_into_a_graph(backend, name, phase):
    """Replayed with other lengths and tables than it was captured with."""
    captured = []

    def attend(query, key, value, *batch):
        captured.append(torch.cuda.is_current_stream_capturing())
        cache, batch = KVCache(key, value), jax.tree.unflatten(treedef, batch)
        call = call_of(query, cache, batch, ROUTED[name])
        return backend.run(call, query, cache, backend.plan(call, batch))[0]

    first, second = (problem_of(phase, ROUTED[name], seed=seed) for seed in (0, 1))
    leaves, treedef = jax.tree.flatten(batch_of(first))
    out = jax.ShapeDtypeStruct(first.query.shape, HALF)
    one = torch_call(attend, out, capturable=True)
    layers = jax.jit(lambda *args: [one(args[0] * (2 - i % 2), *args[1:]) for i in range(8)])
    for problem in (first, first, first, second, first):
        cache, leaves = cache_of(problem), jax.tree.leaves(batch_of(problem))
        outs = layers(jnp.asarray(problem.query), cache.key, cache.value, *leaves)
        assert_attention_close(outs[1], None, problem)
        assert_attention_close(outs[7], None, problem)
    assert captured[-1], "XLA captured nothing"


@on_gpu
@pytest.mark.parametrize("name", ["plain", "sliding_window", "alibi_slopes", "causal=False"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_never_waits_for_the_device(name, phase):
    """Torch raises at whatever synchronises; the first call may, to compile."""
    problem = problem_of(phase, ROUTED[name], block_size=64, head_dim=64)
    arrays = inputs(problem, "cuda")
    call = call_of(*arrays, problem.spec, return_lse=True)
    kernels.run(call, *arrays)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.run(call, *arrays)
    finally:
        torch.cuda.set_sync_debug_mode("default")
