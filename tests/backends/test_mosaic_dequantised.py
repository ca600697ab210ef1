"""Quantised caches that are dequantised before the Mosaic kernel reads them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from cases import SPECS, mixed
from mosaic_rules import BF16, hopper

from pagedattn import AttentionSpec, paged_attention
from pagedattn._dispatch.call import Call, Strides, call_of
from pagedattn._dispatch.dequantise import is_faster_dequantised
from pagedattn.backends.dequantised import dequantised_first
from pagedattn.backends.mosaic.dense import launch
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

KINDS = {
    "int4": {"cache_dtype": "int4", "token_scales": True},
    "int8, per-token scales": {"cache_dtype": "int8", "token_scales": True},
    "float8_e4m3fn, per-token scales": {"cache_dtype": "float8_e4m3fn", "token_scales": True},
    "float8_e5m2": {"cache_dtype": "float8_e5m2"},
}


def a_call(
    cache_dtype: str | None = "int8",
    num_tokens=2048,
    num_seqs=2,
    room=1024,
    token_scales=True,
    **changes,
) -> Call:
    """`room` are the keys that a sequence's row of the tables has entries for."""
    call = Call(
        num_tokens=num_tokens,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        num_blocks=99,
        block_size=16,
        num_seqs=num_seqs,
        max_blocks=room // 16,
        max_query_len=num_tokens // num_seqs,
        dtype="bfloat16",
        device="cuda",
        strides=Strides((), (1,), (1,)),
        spec=AttentionSpec(),
        cache_dtype=cache_dtype,
        token_scales=token_scales and cache_dtype is not None,
    )
    return dataclasses.replace(call, **changes)


@pytest.mark.parametrize(
    ("call", "is_so"),
    [
        (a_call("int4", num_tokens=2), False),
        (a_call("int4", num_tokens=126), False),
        (a_call("int4", num_tokens=128), True),
        (a_call("int4", num_tokens=128, room=1 << 13), True),
        (a_call("int4", num_tokens=128, room=(1 << 13) + 16), False),
        (a_call(None), False),
        (a_call(), True),
        (a_call("float8_e4m3fn"), True),
        (a_call(num_tokens=1022), False),
        (a_call(num_tokens=1024, room=1 << 13), True),
        (a_call(num_tokens=1024, room=(1 << 13) + 16), False),
        (a_call(num_tokens=4096, token_scales=False), True),
        (a_call(num_tokens=4094, token_scales=False), False),
        (a_call(max_query_len=511), False),
        (a_call(spec=AttentionSpec(sliding_window=100)), False),
        (a_call(num_tokens=1 << 17, room=1 << 17), True),
        (a_call(num_tokens=1 << 17, room=(1 << 17) + 16), False),
    ],
)
def test_long_prompts_without_much_room_for_more_keys_are_dequantised_first(call, is_so):
    assert is_faster_dequantised(call) == is_so


def test_tables_with_room_for_more_than_there_is_memory_are_refused_over_int4():
    assert launch._unsupported_bits(a_call("int4", room=1 << 18)) == []
    (reason,) = launch._unsupported_bits(a_call("int4", num_seqs=4, room=1 << 18))
    assert "the tables have room for 4294967296" in reason


def test_few_tokens_for_the_keys_that_are_dequantised_are_slower():
    few, enough = (a_call("int4", tokens, 2, 1 << 14) for tokens in (254, 256))
    assert any("dequantised" in reason for reason in launch.slower_because(few))
    assert launch.slower_because(enough) == []


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "token_scales" in KINDS[kind]])
@pytest.mark.parametrize("name", ["plain", "all"])
def test_the_dequantised_call_is_the_same(kind, name):
    """Of padding, too; scales of heads are applied outside, and dequantised is what is held."""
    problem = mixed(SPECS[name], dtype=BF16, **KINDS[kind])
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(query, cache, batch, problem.spec, return_lse=True)
    call, plain, other = dequantised_first(call, cache, batch)
    assert plain.key.shape[0] == call.num_blocks
    out, lse = paged_attention(query, plain, other, problem.spec, backend="xla", return_lse=True)
    assert_attention_close(out, lse, problem, name="dequantised")


@pytest.mark.lowers
@pytest.mark.parametrize("kind", KINDS)
def test_lowers(kind):
    problem = random_problem([300, 20], [300, 20], AttentionSpec(), dtype=BF16, head_dim=128,
                             block_size=16, **KINDS[kind])  # fmt: skip
    query, cache, batch = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = call_of(query, cache, batch, problem.spec, return_lse=True)
    traced = launch.attend.trace(call, query, cache, batch, 132)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()


@hopper
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["plain", "sliding_window", "all"])
@pytest.mark.parametrize("lens", [([1500, 900], [1500, 1400]), ([40, 1], [400, 90])])
def test_results(lens, name, kind):
    """Of prompts that are dequantised in all kinds, and of what only int4 is."""
    problem = random_problem(
        *lens, SPECS[name], dtype=BF16, head_dim=128, block_size=16, **KINDS[kind]
    )
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem)
    call = jax.jit(
        lambda *arrays: paged_attention(*arrays, problem.spec, backend="mosaic", return_lse=True)
    )
    assert_attention_close(*call(*arrays), problem, name="mosaic")
