"""Caches of fewer bits in the example engine: what fits, and that no company changes an answer."""

import jax
import jax.numpy as jnp
import pytest
from pagedattn_serving.blocks.cache_dtypes import CACHE_DTYPES, bytes_of_token, more_tokens
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute
from test_serving import POLICIES, TIGHT, nothing_is_lost
from tiny import ROOMY, TINY, serve, tiny_params, tiny_requests

pytestmark = pytest.mark.usefixtures("exact_products")
FEW_BITS = [word for word, dtype in CACHE_DTYPES.items() if dtype and word != "fp8"]


def completions_of(kv_cache_dtype, limits=ROOMY, preemption=Recompute):
    engine = Engine(tiny_params(), TINY, limits, None, preemption, True, kv_cache_dtype)
    serve(engine, tiny_requests((1, 9, 3, 9, 8, 2, 11)))
    return engine.completions, engine


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kv_cache_dtype", FEW_BITS)
def test_preempted_requests_answer_as_if_alone(kv_cache_dtype, policy):
    """Scales of tokens are copied, swapped and found again with their blocks."""
    expected, _ = completions_of(kv_cache_dtype)
    completions, engine = completions_of(kv_cache_dtype, TIGHT, POLICIES[policy])
    assert engine.scheduler.num_preemptions > 0
    assert completions == expected
    nothing_is_lost(engine)


def test_fp8_is_e4m3_and_other_words_are_refused():
    engine = completions_of("fp8")[1]
    assert engine.memory.caches[0][0].dtype == jnp.float8_e4m3fn
    with pytest.raises(ValueError, match="got 'fp4'"):
        completions_of("fp4")


@pytest.mark.parametrize("kv_cache_dtype", CACHE_DTYPES)
def test_what_a_token_takes_is_what_its_caches_hold(kv_cache_dtype):
    _, engine = completions_of(kv_cache_dtype)
    caches = jax.tree.leaves(engine.memory.caches)
    tokens = ROOMY.num_blocks * ROOMY.block_size
    dtype = engine.memory.caches[0][0].dtype
    assert bytes_of_token(TINY, dtype) == sum(leaf.nbytes for leaf in caches) / tokens
    assert f"in {dtype} take" in more_tokens(TINY, kv_cache_dtype, "float32")


def test_four_bits_hold_seven_times_float32():
    """Heads of 8 columns: of int4 4 bytes and a scale, where float32 has 32."""
    plain, few = bytes_of_token(TINY, "float32"), bytes_of_token(TINY, "int4")
    assert more_tokens(TINY, "int4", "float32").count(f"{plain / few:.2f} times as many") == 1
    assert plain / few > 4


def test_the_command_takes_vllms_words(capsys):
    arguments = pytest.importorskip("pagedattn_serving.server.arguments")
    parser = arguments.make_parser("pagedattn-serve", None)
    assert parser.parse_args(["DIR"]).kv_cache_dtype == "auto"
    assert parser.parse_args(["DIR", "--kv-cache-dtype", "fp8"]).kv_cache_dtype == "fp8"
    with pytest.raises(SystemExit):
        parser.parse_args(["DIR", "--kv-cache-dtype", "int3"])
    assert "fp8_e5m2" in capsys.readouterr().err
