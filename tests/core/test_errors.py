"""What bad input gets: InvalidInputError before anything is written, in words that mend it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from cases import as_numpy, assert_words, good_call, random_cache, rows
from pagedattn_interop import to_torch

import pagedattn_torch
from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    KVCache,
    copy_blocks,
    init_kv_cache,
    make_batch,
    paged_attention,
    ragged_attention,
    swap_blocks,
    write_kv,
)

BAD_SPECS = [
    # fields, words that the message must hold
    ({"sliding_window": 0}, ["sliding_window", "at least 1", "0", "None"]),
    ({"sliding_window": -1}, ["sliding_window", "at least 1", "-1", "None"]),
    ({"sliding_window": 2.5}, ["sliding_window", "integer", "2.5"]),
    ({"sliding_window": True}, ["sliding_window", "integer", "True"]),
    ({"logits_soft_cap": 0.0}, ["logits_soft_cap", "above 0", "0.0", "None"]),
    ({"logits_soft_cap": -30.0}, ["logits_soft_cap", "above 0", "-30.0", "None"]),
    ({"logits_soft_cap": float("nan")}, ["logits_soft_cap", "nan"]),
    ({"logits_soft_cap": 1e-46}, ["logits_soft_cap", "1e-30", "1e-46"]),
    ({"logits_soft_cap": 3e38}, ["logits_soft_cap", "1e30", "3e+38", "None"]),
    ({"scale": float("inf")}, ["scale", "finite", "inf"]),
    ({"scale": -1e39}, ["scale", "float32", "-1e+39"]),
    ({"alibi_slopes": (0.5, 1e39)}, ["alibi_slopes", "float32", "1e+39"]),
    ({"scale": "big"}, ["scale", "'big'"]),
    ({"alibi_slopes": (0.5, float("nan"))}, ["alibi_slopes", "nan"]),
    ({"alibi_slopes": 0.5}, ["alibi_slopes", "0.5"]),
]


@pytest.mark.parametrize(("fields", "words"), BAD_SPECS, ids=lambda x: str(x)[:40])
def test_bad_specs(fields, words):
    with pytest.raises(InvalidInputError) as error:
        AttentionSpec(**fields)
    assert_words(error, words)


GOOD_BATCH = {
    "query_lens": [3, 1],
    "context_lens": [0, 5],
    "block_tables": [[0], [1, 2]],
    "block_size": 4,
}
BAD_BATCHES = [
    ({"query_lens": [-1, 1]}, ["query_lens", "negative", "-1"]),
    ({"context_lens": [0, -5]}, ["context_lens", "negative", "-5"]),
    ({"context_lens": None, "key_lens": [3, -2]}, ["key_lens", "negative", "-2"]),
    ({"query_lens": [3.0, 1.0]}, ["query_lens", "integer", "float"]),
    ({"query_lens": [[3, 1]]}, ["query_lens", "dimension"]),
    ({"context_lens": [0]}, ["context_lens", "2 sequences", "1"]),
    ({"context_lens": None}, ["context_lens"]),
    ({"context_lens": None, "key_lens": [3]}, ["key_lens", "2 sequences"]),
    ({"block_tables": [[0]]}, ["block_tables", "2 sequences", "1"]),
    ({"block_tables": [[0], [1]]}, ["sequence 1", "2 blocks", "6", "block_tables"]),
    ({"block_tables": [[], [1, 2]]}, ["sequence 0", "1 block", "block_tables"]),
    ({"block_tables": [[0], [1, -1]]}, ["sequence 1", "block ids", "-1"]),
    ({"block_tables": [[0.0], [1.0, 2.0]]}, ["block_tables", "integer", "float"]),
    ({"block_tables": [0, 1]}, ["block_tables", "dimension"]),
    ({"block_tables": [[2**40], [1, 2]]}, ["sequence 0", "int32"]),
    ({"block_tables": [[2], [1, 2]]}, ["slots [9]", "several tokens"]),
    ({"query_lens": [1, 1], "block_tables": [[2], [1, 2]], "context_lens": [0, 4]}, ["share"]),
    ({"block_size": 0}, ["block_size", "above 0", "0"]),
    ({"block_size": -4}, ["block_size", "above 0", "-4"]),
    ({"block_size": 4.0}, ["block_size", "integer", "4.0"]),
    ({"pad_tokens": 3}, ["pad_tokens", "at least 4", "3"]),
    ({"pad_seqs": 1}, ["pad_seqs", "at least 2", "1"]),
    ({"pad_blocks": 1}, ["pad_blocks", "at least 2", "1"]),
    ({"pad_tokens": 8.0}, ["pad_tokens", "integer", "8.0"]),
    ({"max_query_len": 2}, ["max_query_len", "at least 3", "2"]),
]


@pytest.mark.parametrize(("change", "words"), BAD_BATCHES, ids=lambda x: str(x)[:50])
def test_bad_batches(change, words):
    make_batch(**GOOD_BATCH)
    with pytest.raises(InvalidInputError) as error:
        make_batch(**{**GOOD_BATCH, **change})
    assert_words(error, words)


def test_two_sequences_that_write_one_slot():
    with pytest.raises(InvalidInputError, match="slots"):
        make_batch([1, 1], [4, 4], [[0, 2], [1, 2]], block_size=4)


@pytest.mark.parametrize("shape", [(-1, 4, 1, 8), (2, 0, 1, 8), (2, 4, 0, 8), (2, 4, 1, 0)])
def test_empty_caches(shape):
    with pytest.raises(InvalidInputError, match="above 0"):
        init_kv_cache(*shape)


@pytest.mark.parametrize("dtype", [jnp.int16, jnp.int32, jnp.bool_, jnp.complex64])
def test_caches_of_no_float(dtype):
    with pytest.raises(InvalidInputError, match="floating"):
        init_kv_cache(2, 4, 1, 8, dtype)


def test_more_slots_than_int32_counts():
    with pytest.raises(InvalidInputError, match="int32"):
        init_kv_cache(2**28, 16, 1, 1)


def i32(*values):
    return np.array(values, np.int32)


# What is wrong with a write of two tokens to random_cache(): changes to (key, value, slots), words.
BAD_WRITES = {
    "rank": (lambda k, v, s: (k[0], v, s), ["key", "num_kv_heads", "[2, 8]"]),
    "kv heads": (
        lambda k, v, s: (k[:, :1], v[:, :1], s),
        ["key", "[num_tokens, 2, 8]", "[2, 1, 8]"],
    ),
    "head_dim": (lambda k, v, s: (k, v[..., :4], s), ["value", "[2, 2, 8]", "[2, 2, 4]"]),
    "tokens": (lambda k, v, s: (k, v, s[:1]), ["slot_mapping", "2 tokens", "got 1"]),
    "dtype": (lambda k, v, s: (k, v.astype(jnp.float16), s), ["value", "float32", "float16"]),
    "both dtypes": (lambda k, v, s: (k.astype(jnp.bfloat16), v, s), ["key", "bfloat16"]),
    "float slots": (lambda k, v, s: (k, v, s.astype(jnp.float32)), ["slot_mapping", "float32"]),
    "bool slots": (lambda k, v, s: (k, v, s.astype(bool)), ["slot_mapping", "bool"]),
    "slots of rank 2": (lambda k, v, s: (k, v, s[:, None]), ["slot_mapping", "[2, 1]"]),
}
BAD_SLOTS = {
    "too high": (i32(3, 36), ["slot_mapping", "35", "36"]),
    "below -1": (i32(3, -2), ["slot_mapping", "-2", "-1"]),
    "duplicate": (i32(3, 3), ["[3]", "several"]),
}


@pytest.mark.parametrize("name", BAD_WRITES)
@pytest.mark.parametrize("jit", [False, True])
def test_bad_writes(name, jit):
    """Shapes and dtypes: eagerly and at trace time; the cache stays as it was."""
    change, words = BAD_WRITES[name]
    cache = random_cache()
    before = as_numpy(cache)
    args = change(*rows(2, cache), jnp.array([3, 5], jnp.int32))
    call = jax.jit(write_kv, donate_argnums=0) if jit else write_kv
    with pytest.raises(InvalidInputError) as error:
        call(cache, *args)
    assert_words(error, words)
    assert not cache.key.is_deleted()
    np.testing.assert_array_equal(cache.key, before[0])


@pytest.mark.parametrize("name", BAD_SLOTS)
def test_bad_slots(name):
    slots, words = BAD_SLOTS[name]
    cache = random_cache()
    with pytest.raises(InvalidInputError) as error:
        write_kv(cache, *rows(2, cache), jnp.asarray(slots))
    assert_words(error, words)


def test_two_dropped_tokens_are_no_duplicates():
    cache = random_cache()
    write_kv(cache, *rows(2, cache), jnp.array([-1, -1], jnp.int32))


@pytest.mark.parametrize("name", BAD_SLOTS)
def test_torch_writes_nothing_when_it_raises(name):
    slots, words = BAD_SLOTS[name]
    cache = to_torch(random_cache(), copy=True)
    before = cache.key.clone()
    key, value = (to_torch(x, copy=True) for x in rows(2, random_cache()))
    with pytest.raises(InvalidInputError) as error:
        pagedattn_torch.write_kv_(cache, key, value, torch.tensor(slots))
    assert_words(error, words)
    assert torch.equal(cache.key, before)


@pytest.mark.parametrize("name", BAD_WRITES)
def test_bad_torch_writes(name):
    change, _ = BAD_WRITES[name]
    bad = change(*rows(2, random_cache()), jnp.array([3, 5], jnp.int32))
    cache, bad = to_torch((random_cache(), bad), copy=True)
    before = cache.key.clone()
    with pytest.raises(InvalidInputError):
        pagedattn_torch.write_kv_(cache, *bad)
    assert torch.equal(cache.key, before)


BAD_COPIES = [
    (i32(0, 9), i32(1, 2), ["src", "8", "9"]),
    (i32(0, -2), i32(1, 2), ["src", "-2"]),
    (i32(0, 1), i32(1, 9), ["dst", "8", "9"]),
    (i32(0, 1), i32(2, 2), ["dst", "twice"]),
    (i32(0, 1), i32(2), ["src", "dst", "equally long", "2", "1"]),
    (np.float32([0, 1]), i32(1, 2), ["src", "float32"]),
    (i32(0, 1), np.array([[1, 2]]), ["dst", "[1, 2]"]),
]


@pytest.mark.parametrize(("src", "dst", "words"), BAD_COPIES)
def test_bad_copies(src, dst, words):
    for convert, copy, cache in (
        (jnp.asarray, copy_blocks, random_cache()),
        (torch.tensor, pagedattn_torch.copy_blocks_, to_torch(random_cache(), copy=True)),
    ):
        before = as_numpy(cache)[0]
        with pytest.raises(InvalidInputError) as error:
            copy(cache, convert(src), convert(dst))
        assert_words(error, words)
        np.testing.assert_array_equal(as_numpy(cache)[0], before)


OTHER_CACHES = {
    "block_size": {"block_size": 8},
    "num_kv_heads": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 16},
    "dtype": {"dtype": np.float16},
}


@pytest.mark.parametrize("name", OTHER_CACHES)
def test_swaps_between_unlike_caches(name):
    with pytest.raises(InvalidInputError, match=name):
        swap_blocks(
            random_cache(), random_cache(**OTHER_CACHES[name]), jnp.array([0]), jnp.array([0])
        )


def change_batch(**fields):
    def change(query, cache, batch, spec):
        fresh = {name: make(getattr(batch, name)) for name, make in fields.items()}
        return query, cache, dataclasses.replace(batch, **fresh), spec

    return change


def change_cache(make):
    return lambda query, cache, batch, spec: (query, make(cache), batch, spec)


def change_query(make):
    return lambda query, cache, batch, spec: (make(query), cache, batch, spec)


def with_slopes(*slopes):
    return lambda q, cache, batch, spec: (q, cache, batch, AttentionSpec(alibi_slopes=slopes))


def cut_blocks(cache):
    """The same memory in blocks of 2."""
    return jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[2:]), cache)


# Wrong in shape or dtype: known at trace time. change of (query, cache, batch, spec), words.
BAD_CALLS = {
    "query rank": (change_query(lambda q: q[0]), ["query", "num_heads", "[4, 16]"]),
    "query dtype": (
        change_query(lambda q: q.astype(jnp.bfloat16)),
        ["query", "float32", "bfloat16"],
    ),
    "head_dim": (change_query(lambda q: q[..., :8]), ["query", "head_dim 16", "[20, 4, 8]"]),
    "heads": (change_query(lambda q: q[:, :3]), ["num_heads", "num_kv_heads", "2", "3"]),
    "no heads": (change_query(lambda q: q[:, :0]), ["num_heads"]),
    "tokens": (change_query(lambda q: q[:-1]), ["query", "20 tokens", "19"]),
    "cache rank": (
        change_cache(lambda c: jax.tree.map(lambda x: x[..., 0], c)),
        ["cache", "block_size", "head_dim"],
    ),
    "halves": (
        change_cache(lambda c: KVCache(c.key, c.value[:-1])),
        ["cache", "[..., value_dim]"],
    ),
    "half dtypes": (
        change_cache(lambda c: KVCache(c.key, c.value.astype(jnp.float16))),
        ["cache", "float16"],
    ),
    "integer cache": (
        change_cache(lambda c: jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.int32), c)),
        ["float", "int32"],
    ),
    "block size": (change_cache(cut_blocks), ["blocks of 4", "2"]),
    "too few slopes": (with_slopes(0.5, 0.25), ["alibi_slopes", "4", "2"]),
    "too many slopes": (with_slopes(*[0.5] * 5), ["alibi_slopes", "4", "5"]),
    "float seq_lens": (
        change_batch(seq_lens=lambda x: x.astype(jnp.float32)),
        ["seq_lens", "float32"],
    ),
    "float tables": (
        change_batch(block_tables=lambda x: x.astype(jnp.float32)),
        ["block_tables", "float32"],
    ),
    "flat tables": (change_batch(block_tables=lambda x: x.ravel()), ["block_tables", "dimension"]),
    "rows of tables": (change_batch(block_tables=lambda x: x[:-1]), ["block_tables", "6"]),
    "starts": (change_batch(query_start_loc=lambda x: x[:-1]), ["query_start_loc", "6"]),
}

# Wrong in value: known outside jit only.
BAD_VALUES = {
    "block id too high": (
        change_batch(block_tables=lambda x: x.at[1, 0].set(10**6)),
        ["block_tables", "1000000"],
    ),
    "block id negative": (
        change_batch(block_tables=lambda x: x.at[1, 4].set(-1)),
        ["block_tables", "-1"],
    ),
    "negative length": (change_batch(seq_lens=lambda x: x.at[0].set(-1)), ["seq_lens", "-1"]),
    "length past the table": (
        change_batch(seq_lens=lambda x: x.at[2].set(25)),
        ["seq_lens", "6 blocks of 4", "25"],
    ),
    "starts that fall": (
        change_batch(query_start_loc=lambda x: x.at[1].set(15)),
        ["query_start_loc", "rise"],
    ),
    "starts past the tokens": (
        change_batch(query_start_loc=lambda x: x.at[-1].set(21)),
        ["query_start_loc", "20"],
    ),
    "starts not at 0": (
        change_batch(query_start_loc=lambda x: x.at[0].set(1)),
        ["query_start_loc", "0"],
    ),
    "query above the bound": (
        lambda q, cache, batch, spec: (
            q,
            cache,
            dataclasses.replace(batch, max_query_len=4),
            spec,
        ),
        ["query_start_loc", "7", "4"],
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name, backend, mode):
    change, words = BAD_CALLS[name]
    query, cache, batch, spec = change(*good_call())
    call = jax.jit(paged_attention, static_argnames=("spec", "backend"))
    with pytest.raises(InvalidInputError) as error:
        (call if mode == "jit" else paged_attention)(query, cache, batch, spec, backend=backend)
    assert_words(error, words)


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values(name, backend):
    change, words = BAD_VALUES[name]
    with pytest.raises(InvalidInputError) as error:
        paged_attention(*change(*good_call()), backend=backend)
    assert_words(error, words)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_torch_calls(name):
    refuse_torch_call(*BAD_CALLS[name])


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_torch_values(name):
    """On a GPU they are not looked at: that would wait for it."""
    refuse_torch_call(*BAD_VALUES[name])


def refuse_torch_call(change, words):
    query, cache, batch, spec = change(*good_call())
    query, cache = to_torch((query, cache), copy=True)
    with pytest.raises(InvalidInputError) as error:
        pagedattn_torch.paged_attention(query, cache, batch, spec)
    assert_words(error, words)


def test_torch_functions_take_no_jax_arrays():
    with pytest.raises(InvalidInputError, match=r"torch tensor.*to_torch"):
        pagedattn_torch.paged_attention(*good_call())


@pytest.mark.parametrize("name", BAD_VALUES)
def test_bad_values_in_jit_read_nothing_outside(name, backend):
    """Only the device knows them there: any answer for that sequence, right ones for others."""
    change, _ = BAD_VALUES[name]
    query, cache, batch, spec = change(*good_call())
    call = jax.jit(paged_attention, static_argnames=("spec", "backend"))
    out = call(query, cache, batch, spec, backend=backend)
    assert out.shape == query.shape
    assert jax.block_until_ready(out).dtype == query.dtype
    if "block" in name:  # the table of sequence 1 alone is wrong: rows 6..12
        want = np.asarray(paged_attention(*good_call(), backend=backend))
        np.testing.assert_allclose(out[:6], want[:6], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(out[13:], want[13:], rtol=1e-5, atol=1e-6)


def ragged(**changes):
    x = jnp.ones((5, 2, 8))
    starts = jnp.array([0, 2, 5], jnp.int32)
    arguments = {
        "query": x,
        "key": x,
        "value": x,
        "query_start_loc": starts,
        "key_start_loc": starts,
        "max_query_len": 4,
        "max_key_len": 4,
    }
    return ragged_attention(**{**arguments, **changes}, backend="xla")


BAD_RAGGED = [
    ({"key": jnp.ones((4, 2, 8))}, ["key", "value", "[4, 2, 8]"]),
    ({"query": jnp.ones((5, 3, 8))}, ["num_heads", "2", "3"]),
    ({"query": jnp.ones((5, 2, 4))}, ["query", "head_dim", "[5, 2, 4]"]),
    ({"query": jnp.ones((5, 2, 8), jnp.float16)}, ["query", "float16"]),
    ({"query_start_loc": jnp.array([0, 4])}, ["query_start_loc", "key_start_loc", "(2,)"]),
    ({"query_start_loc": jnp.array([0.0, 2, 5])}, ["query_start_loc", "float32"]),
    ({"key_start_loc": jnp.array([0, 2, 6])}, ["key_start_loc", "5", "6"]),
    ({"key_start_loc": jnp.array([0, 6, 5])}, ["key_start_loc", "rise"]),
    ({"max_query_len": 2}, ["query", "3", "2"]),
    ({"max_key_len": 2}, ["key", "3", "2"]),
    ({"spec": AttentionSpec(alibi_slopes=(1.0,))}, ["alibi_slopes", "2", "1"]),
]


@pytest.mark.parametrize(("change", "words"), BAD_RAGGED, ids=lambda x: str(list(x))[:40])
def test_bad_ragged_calls(change, words):
    assert ragged().shape == (5, 2, 8)
    with pytest.raises(InvalidInputError) as error:
        ragged(**change)
    assert_words(error, words)
