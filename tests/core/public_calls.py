"""A good call of every public function: what the fuzzer starts from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from cases import good_call, random_cache, rows
from pagedattn_interop import to_torch

import pagedattn as pa
import pagedattn_torch as pt


def fixed(function, **arguments):
    return lambda: (function, dict(arguments))


def pool():
    empty = pa.init_block_pool(8, 2, max_seqs=3, max_blocks=3)
    grown, _ = pa.append_tokens(empty, jnp.array([3, 0, 2]))
    return pa.hold_blocks(grown, grown.block_tables[0, :1])


def shared():
    """What does not change: JAX arrays, where new ones lie (see conftest's `on_cpu`)."""
    return shared_on(jax.config.jax_default_device)


@functools.cache
def shared_on(device):
    del device
    query, cache, batch, spec = good_call()
    return {"query": query, "cache": cache, "batch": batch, "spec": spec}


def i32(*values):
    return jnp.array(values, jnp.int32)


SIZES = {"num_blocks": 4, "block_size": 2}
GOOD_BATCH = {
    "query_lens": [3, 1],
    "context_lens": [0, 5],
    "block_tables": [[0], [1, 2]],
    "block_size": 4,
    "pad_tokens": 6,
    "pad_seqs": 3,
    "pad_blocks": 4,
    "max_query_len": 4,
}
POSITIONS = {"query_positions": np.arange(3), "key_positions": np.arange(5)}


def ragged_arguments():
    x, starts = jnp.ones((5, 2, 8)), i32(0, 2, 5)
    names = ("query", "key", "value")
    return {
        **dict.fromkeys(names, x),
        "query_start_loc": starts,
        "key_start_loc": starts,
        "spec": pa.AttentionSpec(),
        "max_query_len": 4,
        "max_key_len": 4,
        "backend": "xla",
        "return_lse": True,
        "batch_invariant": False,
        "sinks": jnp.zeros(2),
    }


def state():
    return {
        "out_a": jnp.ones((2, 3)),
        "lse_a": jnp.zeros(2),
        "out_b": jnp.ones((2, 3)),
        "lse_b": jnp.zeros(2),
    }


def across(out, lse, axis):
    """`merge_across` where there is an axis, of which the arrays know nothing."""
    return jax.vmap(lambda _: pa.merge_across(out, lse, axis), axis_name="x")(jnp.zeros(2))


def attend(backend):
    return lambda: (pa.paged_attention, {**shared(), "backend": backend, "return_lse": False})


def latent(cache):
    """The cache's keys alone, with half of their columns as values."""
    return pa.KVCache(cache.key, None, value_dim=cache.head_dim // 2)


def attend_to_latents():
    cache = latent(shared()["cache"])
    return pa.paged_attention, {**shared(), "cache": cache, "backend": "xla"}


def cascade():
    given = dict(shared())
    parts = dict(zip(("prefix", "rest"), pa.split_prefix(given.pop("batch")), strict=True))
    return given | parts | {"backend": "xla"}


def pooled(function, **arguments):
    return lambda: (function, {"pool": pool(), **arguments})


def host():
    return pa.init_block_pool(4, 2, max_seqs=3, max_blocks=3)


def growth():
    return pa.append_tokens(pool(), i32(1, 1, 0))[1]


CORE = {
    "AttentionSpec": fixed(
        pa.AttentionSpec,
        scale=0.5,
        causal=True,
        sliding_window=3,
        logits_soft_cap=1.0,
        alibi_slopes=(0.5, 0.25),
    ),
    "alibi_slopes": fixed(pa.alibi_slopes, num_heads=4),
    "init_kv_cache": fixed(
        pa.init_kv_cache, **SIZES, num_kv_heads=1, head_dim=4, dtype=jnp.float32, value_dim=3
    ),
    "init_latent_cache": fixed(
        pa.init_latent_cache, **SIZES, head_dim=4, value_dim=3, num_kv_heads=1, dtype=jnp.float32
    ),
    "write_kv of latents": lambda: (
        pa.write_kv,
        {
            "cache": latent(random_cache()),
            "key": rows(2, random_cache())[0],
            "value": None,
            "slot_mapping": i32(3, 5),
        },
    ),
    "paged_attention to latents": attend_to_latents,
    "write_kv": lambda: (
        pa.write_kv,
        {
            "cache": random_cache(),
            **dict(zip(("key", "value"), rows(2, random_cache()), strict=True)),
            "slot_mapping": i32(3, 5),
        },
    ),
    "copy_blocks": lambda: (
        pa.copy_blocks,
        {"cache": random_cache(), "src": i32(0, 1), "dst": i32(1, 2)},
    ),
    "swap_blocks": lambda: (
        pa.swap_blocks,
        {
            "src_cache": random_cache(),
            "dst_cache": random_cache(5),
            "src": i32(0, 1),
            "dst": i32(1, 2),
        },
    ),
    "swap_blocks of latents": lambda: (
        pa.swap_blocks,
        {
            "src_cache": latent(random_cache()),
            "dst_cache": latent(random_cache(5)),
            "src": i32(0, 1),
            "dst": i32(1, 2),
        },
    ),
    "fill_blocks": lambda: (
        pa.fill_blocks,
        {"cache": random_cache(), "blocks": i32(0, 1), "value": 0.0},
    ),
    "make_batch": fixed(pa.make_batch, **GOOD_BATCH),
    "make_batch of written tokens": fixed(
        pa.make_batch, **{**GOOD_BATCH, "context_lens": None, "key_lens": [3, 6]}
    ),
    "check_batch": lambda: (
        pa.check_batch,
        {name: shared()[name] for name in ("batch", "cache", "spec")},
    ),
    "paged_attention": attend("xla"),
    "paged_attention by sdpa": attend("sdpa"),
    "paged_attention by any": attend(None),
    "ragged_attention": lambda: (pa.ragged_attention, ragged_arguments()),
    "explain": lambda: (pa.explain, {**shared(), "return_lse": False}),
    "cascade_attention": lambda: (pa.cascade_attention, cascade()),
    "split_prefix": lambda: (pa.split_prefix, {"batch": shared()["batch"]}),
    "merge_states": lambda: (pa.merge_states, state()),
    "merge_across": lambda: (across, {"out": jnp.ones((2, 3)), "lse": jnp.zeros(2), "axis": "x"}),
    "attention_bias": fixed(pa.attention_bias, **POSITIONS, spec=pa.AttentionSpec()),
    "causal_mask": fixed(pa.causal_mask, **POSITIONS),
    "sliding_window_mask": fixed(pa.sliding_window_mask, **POSITIONS, sliding_window=2),
    "alibi_bias": fixed(pa.alibi_bias, **POSITIONS, slopes=(0.5, 0.25)),
    "positions": fixed(
        pa.positions, query_start_loc=i32(0, 2, 3), seq_lens=i32(2, 8), num_tokens=4
    ),
    "slot_mapping": fixed(
        pa.slot_mapping,
        block_tables=i32(5, 3)[None],
        seq_ids=i32(0, 0, -1),
        positions=i32(1, 4, 0),
        block_size=4,
    ),
    "init_block_pool": fixed(pa.init_block_pool, **SIZES, max_seqs=2, max_blocks=2),
    "append_tokens": pooled(pa.append_tokens, num_tokens=i32(1, 1, 0), max_new_tokens=2),
    "fork": pooled(pa.fork, parents=i32(0), children=i32(1)),
    "share_blocks": pooled(pa.share_blocks, seq=1, blocks=i32(0, 1), num_tokens=3),
    "hold_blocks": pooled(pa.hold_blocks, blocks=i32(0, 1)),
    "drop_blocks": pooled(pa.drop_blocks, blocks=i32(0, 1)),
    "release": pooled(pa.release, seqs=i32(0, -1)),
    "release_behind": pooled(pa.release_behind, window=2, max_new_tokens=2),
    "swap_out": lambda: (
        pa.swap_out,
        {"pool": pool(), "host_pool": host(), "seqs": i32(0), "host_seqs": i32(1)},
    ),
    "swap_in": lambda: (
        pa.swap_in,
        {"pool": host(), "host_pool": pool(), "host_seqs": i32(0), "seqs": i32(1)},
    ),
    "next_batch": pooled(pa.next_batch, query_lens=i32(2, 0, 1), num_tokens=4, max_query_len=2),
    "next_batches": lambda: (
        pa.next_batches,
        {
            "pools": [pool(), pool()],
            "query_lens": i32(2, 0, 1),
            "num_tokens": 4,
            "max_query_len": 2,
        },
    ),
    "batch_from_pool": pooled(
        pa.batch_from_pool, query_lens=i32(2, 0, 1), num_tokens=4, max_query_len=2
    ),
    "Growth.require": lambda: (
        lambda ok: dataclasses.replace(growth(), ok=ok).require(),
        {"ok": growth().ok},
    ),
}


def tensors(tree):
    return to_torch(tree, copy=True)


def torch_attend(backend):
    def make():
        arguments = dict(shared())
        arguments["query"], arguments["cache"] = tensors((arguments["query"], arguments["cache"]))
        return pt.paged_attention, {**arguments, "backend": backend, "return_lse": False}

    return make


def torch_ragged():
    arguments = ragged_arguments() | {"backend": "sdpa"}
    names = ("query", "key", "value", "query_start_loc", "key_start_loc")
    return pt.ragged_attention, arguments | {name: tensors(arguments[name]) for name in names}


def torch_explain():
    _, arguments = torch_attend(None)()
    del arguments["backend"]
    return pt.explain, arguments


def torch_attend_to_latents():
    attend, arguments = torch_attend("sdpa")()
    return attend, {**arguments, "cache": latent(arguments["cache"])}


def torch_write_latents():
    arguments = {
        "cache": tensors(latent(random_cache())),
        "key": tensors(rows(2, random_cache())[0]),
    }
    return pt.write_kv_, {**arguments, "value": None, "slot_mapping": torch.tensor([3, 5])}


def torch_write():
    key, value = tensors(rows(2, random_cache()))
    arguments = {"cache": tensors(random_cache()), "key": key, "value": value}
    return pt.write_kv_, {**arguments, "slot_mapping": torch.tensor([3, 5])}


def torch_copy():
    blocks = {"src": torch.tensor([0, 1]), "dst": torch.tensor([1, 2])}
    return pt.copy_blocks_, {"cache": tensors(random_cache()), **blocks}


def torch_swap():
    caches = {"src_cache": tensors(random_cache()), "dst_cache": tensors(random_cache(5))}
    return pt.swap_blocks_, {**caches, "src": torch.tensor([0, 1]), "dst": torch.tensor([1, 2])}


METADATA = {
    "num_prefills": 1,
    "num_prefill_tokens": 3,
    "num_decode_tokens": 1,
    "slot_mapping": torch.tensor([0, 1, 2, 8]),
    "seq_lens": [3, 5],
    "seq_lens_tensor": torch.tensor([3, 5]),
    "block_tables": torch.tensor([[0, 0], [1, 2]]),
    "context_lens_tensor": torch.tensor([0, 4]),
    "query_start_loc": torch.tensor([0, 3, 4]),
    "max_query_len": 3,
    "max_decode_query_len": 1,
    "max_prefill_seq_len": 3,
    "max_decode_seq_len": 5,
    "is_prompt": False,
    "encoder_seq_lens": [2, 3],
    "encoder_seq_lens_tensor": torch.tensor([2, 3]),
    "max_encoder_seq_len": 3,
    "num_encoder_tokens": 5,
    "cross_slot_mapping": torch.tensor([12, 13, 16, 17, 18]),
    "cross_block_tables": torch.tensor([[3], [4]]),
}


def layer():
    return pt.TorchSDPABackendImpl(num_heads=2, head_size=8)


def forward(attn_type):
    def make():
        cross = attn_type in ("encoder", "encoder_decoder")
        queries, keys = (5 if attn_type == "encoder" else 4), 5 if cross else 4
        arguments = {
            "query": torch.ones(queries, 16),
            "key": torch.ones(keys, 16),
            "value": torch.ones(keys, 16),
            "kv_cache": torch.zeros(2, 6, 4, 2, 8),
            "attn_metadata": pt.TorchSDPAMetadata(**METADATA),
            "k_scale": 1.0,
            "v_scale": 1.0,
            "attn_type": attn_type,
        }
        return layer().forward, arguments

    return make


def layer_cache():
    return torch.ones(2, 6, 4, 2, 8)


IMPL = {
    "num_heads": 4,
    "head_size": 8,
    "scale": 0.5,
    "num_kv_heads": 2,
    "alibi_slopes": [0.1, 0.2, 0.3, 0.4],
    "sliding_window": 4,
    "kv_cache_dtype": "auto",
    "blocksparse_params": None,
    "logits_soft_cap": 1.0,
    "attn_type": "decoder",
}
LISTS = {
    "query_lens": [3, 1],
    "context_lens": [0, 4],
    "block_tables": [[0], [1, 2]],
    "block_size": 4,
    "encoder_lens": [2, 3],
    "cross_block_tables": [[3], [4]],
}
SHAPE = {"num_blocks": 4, "block_size": 8, "num_kv_heads": 2, "head_size": 8}

TORCH = {
    "torch paged_attention": torch_attend("sdpa"),
    "torch paged_attention by any": torch_attend(None),
    "torch ragged_attention": torch_ragged,
    "torch explain": torch_explain,
    "torch paged_attention to latents": torch_attend_to_latents,
    "write_kv_ of latents": torch_write_latents,
    "write_kv_": torch_write,
    "copy_blocks_": torch_copy,
    "swap_blocks_": torch_swap,
    "kv_cache_shape": fixed(pt.kv_cache_shape, **SHAPE),
    "empty_kv_cache": fixed(
        pt.empty_kv_cache,
        shape=(2, 4, 8, 2, 8),
        stride_order=(0, 1, 3, 2, 4),
        dtype=torch.float32,
        device="cpu",
    ),
    "split_kv_cache": lambda: (
        pt.split_kv_cache,
        {"kv_cache": layer_cache(), "num_kv_heads": 2, "head_size": 8},
    ),
    "pack_keys": fixed(pt.pack_keys, keys=torch.zeros(4, 4, 2, 8)),
    "unpack_keys": fixed(pt.unpack_keys, packed=torch.zeros(4, 2, 2, 4, 4)),
    "pack_values": fixed(pt.pack_values, values=torch.zeros(4, 4, 2, 8)),
    "unpack_values": fixed(pt.unpack_values, packed=torch.zeros(4, 2, 8, 4)),
}
CLASSES = {
    "Metadata": fixed(pt.TorchSDPAMetadata, **METADATA),
    "Metadata.from_lists": fixed(pt.TorchSDPAMetadata.from_lists, **LISTS),
    "Metadata.to_batch": lambda: (
        pt.TorchSDPAMetadata(**METADATA).to_batch,
        {"block_size": 4, "attn_type": "decoder"},
    ),
    "Impl": fixed(pt.TorchSDPABackendImpl, **IMPL),
    "forward": forward("decoder"),
    "forward of an encoder": forward("encoder"),
    "forward of cross attention": forward("encoder_decoder"),
    "Backend.copy_blocks": lambda: (
        pt.TorchSDPABackend.copy_blocks,
        {"kv_caches": [layer_cache(), layer_cache()], "src_to_dists": {0: [1], 1: [2]}},
    ),
    "Backend.swap_blocks": lambda: (
        pt.TorchSDPABackend.swap_blocks,
        {
            "src_kv_cache": layer_cache(),
            "dst_kv_cache": layer_cache(),
            "src_to_dst": torch.tensor([[0, 1]]),
        },
    ),
    "Backend.get_kv_cache_shape": fixed(pt.TorchSDPABackend.get_kv_cache_shape, **SHAPE),
}
