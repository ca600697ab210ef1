"""The table of features: every yes matches the oracle, every no is refused by its name."""

import functools
import importlib.util
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensors import tensors

import pagedattn_torch
from pagedattn import BackendUnavailableError, UnsupportedError, paged_attention
from pagedattn.report.table import FEATURES, Cell, call, cells, grouped, keywords, request, requests
from pagedattn.report.usable import usable
from pagedattn.testing import Problem, assert_attention_close
from pagedattn.testing.features import ARRAYS, ATTENTION_TYPES, BATCHES

LAYERS = {
    "sdpa": pagedattn_torch.TorchSDPABackendImpl,
    "xformers": pagedattn_torch.XFormersImpl,
    "ipex": pagedattn_torch.IpexAttnBackendImpl,
}
ENCODERS = ("encoder", "encoder_only")
STATIC = ("spec", "backend", "return_lse", "batch_invariant")
NO_LAYER = ("lse", "value_dim", "latent", "token_scales", *ARRAYS, *BATCHES)


def normal(shape, dtype):
    return jnp.asarray(np.random.default_rng(shape[0]).standard_normal(shape), dtype)


def random_call(asked):
    query, cache, batch, spec = call(asked, normal)
    value = None if cache.value is None else -cache.value[::-1]
    return query, cache.with_planes(cache.key, value), batch, spec


def problem_of(asked, query, cache, batch, spec, **options):
    arrays = jax.tree.map(np.asarray, (query, cache.key, cache.value, batch.block_tables))
    query_lens, key_lens = zip(*asked.lengths, strict=True)
    scales = {"key_scale": cache.key_scale, "value_scale": cache.value_scale}
    if options.get("selection") is not None:
        options["selection"] = options["selection"].blocks
    drafts = {} if batch.tree is None else {"parents": batch.tree.parents}
    given = options | scales | drafts
    given = {n: np.asarray(x) for n, x in given.items() if x is not None}
    return Problem(*arrays, query_lens, key_lens, spec, value_dim=cache.value_dim, **given)


def torch_explain(query, cache, batch, spec, *, return_lse, batch_invariant, **arrays):
    query, cache, arrays = tensors((query, cache, arrays))
    flags = {"return_lse": return_lse, "batch_invariant": batch_invariant}
    return pagedattn_torch.explain(query, cache, batch, spec, **flags, **arrays)


@functools.cache
def core_cells():
    return cells()


@functools.cache
def torch_cells():
    return cells(torch_explain)


def forward(layer, asked, query, cache, batch):
    """The request as a forward: keys out of the cache, which is empty before."""
    query, cache = tensors((query, cache))
    query_lens, key_lens = zip(*asked.lengths, strict=True)
    if asked.attn_type in ENCODERS:
        lens = {"encoder": "encoder_seq_lens", "encoder_only": "seq_lens"}[asked.attn_type]
        tokens = {"encoder": 0, "encoder_only": len(query)}[asked.attn_type]
        meta = layer_meta(len(query_lens), tokens, **{lens: list(key_lens)})
        return layer.forward(query, cache.key[:, 0], cache.value[:, 0], None, meta)
    if asked.attn_type == "decoder":
        meta = pagedattn_torch.AttentionMetadata.from_batch(batch)
        return layer.forward(query, None, None, cache, meta)
    meta = layer_meta(
        len(query_lens),
        len(query),
        seq_lens=list(query_lens),
        encoder_seq_lens=list(key_lens),
        cross_block_tables=batch.block_tables,
    )
    return layer.forward(query, None, None, cache, meta)


def layer_meta(count, tokens, **fields):
    return pagedattn_torch.AttentionMetadata(
        num_prefills=count, num_prefill_tokens=tokens, num_decode_tokens=0, **fields
    )


@pytest.mark.parametrize("feature", FEATURES)
def test_the_table_of_the_core_is_true(feature):
    for cell in core_cells():
        if cell.request.feature == feature:
            # Many cells ask for one and the same call.
            hold(cell.request._replace(feature="", attn_type=""), cell.backend, *cell.reasons)


@functools.cache
def hold(asked, backend, *reasons):
    arguments = random_call(asked)
    options = keywords(asked, normal)
    attend = jax.jit(paged_attention, static_argnames=STATIC)
    if reasons:
        with pytest.raises((UnsupportedError, BackendUnavailableError)) as error:
            attend(*arguments, backend=backend, **options)
        assert all(reason in str(error.value) for reason in reasons)
        return
    result = attend(*arguments, backend=backend, **options)
    out, lse = result if options.pop("return_lse") else (result, None)
    del options["batch_invariant"]
    assert_attention_close(out, lse, problem_of(asked, *arguments, **options), name=backend)


@pytest.mark.parametrize("backend", LAYERS)
@pytest.mark.parametrize("feature", [name for name in FEATURES if name not in NO_LAYER])
def test_the_layers_keep_to_the_table(backend, feature):
    """Through forward, without what it does not take; a refusal has every reason of the table."""
    for cell in torch_cells():
        asked = cell.request
        if (cell.backend, asked.feature) != (backend, feature):
            continue
        query, cache, batch, spec = random_call(asked)
        make = functools.partial(
            LAYERS[backend],
            query.shape[1],
            query.shape[2],
            num_kv_heads=asked.num_kv_heads,
            scale=spec.scale,
            sliding_window=spec.sliding_window,
            logits_soft_cap=spec.logits_soft_cap,
            alibi_slopes=spec.alibi_slopes,
            attn_type=asked.attn_type,
            batch_invariant=asked.batch_invariant,
        )
        if cell.reasons and not computed_otherwise(cell):
            with pytest.raises((UnsupportedError, BackendUnavailableError)) as error:
                forward(make(), asked, query, cache, batch)
            # Constructors refuse the mode, before there is a device to refuse.
            reasons = ["batch_invariant"] if asked.batch_invariant else cell.reasons
            assert all(reason in str(error.value) for reason in reasons)
        else:
            out = forward(make(), asked, query, cache, batch)
            assert_attention_close(out, None, problem_of(asked, query, cache, batch, spec))


def computed_otherwise(cell):
    """Whether the class computes what its backend refuses: ALiBi of prompts, by SDPA."""
    return cell.backend == "ipex" and [r.split(":")[0] for r in cell.reasons] == ["alibi_slopes"]


def test_it_covers_every_feature_and_type():
    asked = requests()
    assert {r.feature for r in asked} == set(FEATURES)
    assert {r.attn_type for r in asked} == set(ATTENTION_TYPES) == {*pagedattn_torch.AttentionType}
    assert {cell.backend for cell in core_cells()} >= {"xla", "sdpa"}
    assert {cell.backend for cell in torch_cells()} >= set(LAYERS)


MISSING = {
    "xformers": "xFormers' attention is not installed: pip install",
    "intel_extension_for_pytorch": "intel_extension_for_pytorch is not installed: pip install",
}


@pytest.mark.parametrize("package", MISSING)
def test_a_backend_that_is_missing_says_so(package):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    backend = {"xformers": "xformers", "intel_extension_for_pytorch": "ipex"}[package]
    reasons = " ".join(usable()[backend]["jax"])
    assert MISSING[package] in reasons or f"{backend} runs on" in reasons  # no device for it here


def test_notes_are_shared_and_numbered():
    asked = request("lse", "decoder")
    encoder = request("lse", "encoder")
    rows, notes = grouped(
        [
            Cell(asked, "a", ["x", "y"]),
            Cell(encoder, "a", []),
            Cell(asked, "b", []),
            Cell(encoder, "b", []),
            Cell(asked, "c", ["y"]),
        ]
    )
    assert rows == [("feature", "a", "b"), ("lse", "partly 1,2", "yes")]
    assert notes == {"x": 1, "y": 2}


def test_dtypes_are_asked_for():
    assert call(request("float16", "encoder"))[0].dtype == jnp.float16


def test_the_encoder_decoder_example_agrees(capsys):
    path = Path(__file__).parents[2] / "examples" / "encoder_decoder.py"
    assert runpy.run_path(str(path))["main"]() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert all(float(line.split()[-1]) < 1e-5 for line in lines)
