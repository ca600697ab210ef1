"""Good calls with drafts that branch, for the fuzzer to start from."""

import functools

import jax
import numpy as np
from cases import good_call, random_cache
from public_calls import GOOD_BATCH, fixed, i32, pool, ragged_arguments, tensors

import pagedattn as pa
import pagedattn_torch as pt

SIZES = {"num_tokens": 4, "max_query_len": 2}
NEW = {"query_lens": i32(2, 0, 1), "parents": i32(-1, 0, -1, 7), **SIZES}


def branching():
    """A call whose batch has a tree; JAX arrays, where new ones lie (see conftest's `on_cpu`)."""
    return branching_on(jax.config.jax_default_device)


@functools.cache
def branching_on(device):
    del device
    query, cache, batch, spec = good_call()
    lens = np.asarray(batch.query_lens)
    batch = pa.make_batch(
        lens,
        None,
        np.asarray(batch.block_tables),
        key_lens=np.asarray(batch.seq_lens),
        parents=np.concatenate([(np.arange(n) - 1) // 2 for n in lens]),
        pad_tokens=batch.num_tokens,
        block_size=batch.block_size,
        max_query_len=batch.max_query_len,
    )
    return {"query": query, "cache": cache, "batch": batch, "spec": spec}


def branched(function, **others):
    return lambda: (function, branching() | others)


def branched_tensors(function, names=("query", "cache"), **others):
    def make():
        arguments = branching()
        return function, arguments | {n: tensors(arguments[n]) for n in names} | others

    return make


def ragged():
    return pa.ragged_attention, {**ragged_arguments(), "parents": i32(-1, 0, -1, 0, 0)}


def torch_ragged():
    arguments = ragged()[1] | {"backend": "sdpa"}
    names = "query", "key", "value", "query_start_loc", "key_start_loc", "sinks", "parents"
    return pt.ragged_attention, arguments | {n: tensors(arguments[n]) for n in names}


def accepted():
    grown, batch, _ = pa.next_batch(pool(), **NEW)
    path = i32(1, -1, -1, -1, 0, -1).reshape(3, 2)
    caches = [random_cache(8, 2), random_cache(8, 2)]
    return pa.accept_tokens, {"pool": grown, "caches": caches, "path": path, "batch": batch}


TREES = {
    "make_batch of a tree": fixed(
        pa.make_batch, **{**GOOD_BATCH, "key_lens": None, "parents": [-1, 0, 0, -1]}
    ),
    "paged_attention to a tree": branched(pa.paged_attention, backend="xla"),
    "paged_attention to a tree by any": branched(pa.paged_attention, backend=None),
    "explain of a tree": branched(pa.explain),
    "check_batch of a tree": lambda: (
        pa.check_batch,
        {name: branching()[name] for name in ("batch", "cache", "spec")},
    ),
    "split_prefix of a tree": lambda: (pa.split_prefix, {"batch": branching()["batch"]}),
    "ragged_attention to a tree": ragged,
    "next_batch of a tree": lambda: (pa.next_batch, {"pool": pool(), **NEW}),
    "next_batches of a tree": lambda: (pa.next_batches, {"pools": [pool(), pool()], **NEW}),
    "batch_from_pool of a tree": lambda: (pa.batch_from_pool, {"pool": pool(), **NEW}),
    "accept_tokens": accepted,
    "torch paged_attention to a tree": branched_tensors(pt.paged_attention, backend="sdpa"),
    "torch paged_attention to a tree of tensors": branched_tensors(
        pt.paged_attention, ("query", "cache", "batch"), backend="sdpa"
    ),
    "torch explain of a tree": branched_tensors(pt.explain),
    "prepare for a tree": branched_tensors(pt.prepare, backend="sdpa"),
    "torch ragged_attention to a tree": torch_ragged,
}
