"""From a call to the kernel: what it takes, and its launch."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from ...._arrays.namespace import cdiv
from ...._dispatch.call import Call
from ...._dispatch.dequantise import XLA, dequantised_bytes, is_faster_dequantised
from ....batch.draft_tree import num_words
from ....cache.quantise import as_read, scaled
from ...dequantised import dequantised_first
from . import split_kv, tiles
from .kernel import attention
from .kernel_config import ROWS, UNIT, UNITS, KernelConfig
from .lines import Lines, lines_of
from .results import by_token
from .token_scales import Scales

SUPPORTS = frozenset(
    {"scale", "scales", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes", "return_lse"}
    | {"parents", "cache_dtype", "token_scales"}
)
DTYPES = ("bfloat16", "float16")
CACHE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
LARGEST_CAP = 1e4  # capped logits are right to eps times the cap
LONGEST_LINE = 8192  # tokens: the lines of so many take 36 MB for a group of 4 heads
MEASURED_HEAD_DIM = 128
MEASURED = ("scale", "return_lse", "cache_dtype", "token_scales")  # options
LARGEST_DECODE_BLOCK = 64  # tokens
MOST_INT4_BYTES = 1 << 31  # of keys and values


def refusals(call: Call) -> list[str]:
    """Why the kernel cannot run a call; empty when it can."""
    values = _unsupported_cap(call) + _unsupported_lines(call)
    sizes = _unsupported_sizes(call) + _unsupported_bits(call)
    return sizes + values + unsupported_device()


def slower_because(call: Call) -> list[str]:
    """Why another backend is likely faster: the rule of `backend=None`."""
    reasons, least = [], call.crossings.mosaic_query_len
    if call.longest_query < least and not _is_ahead_with_short_queries(call):
        reasons.append(f"short queries: max_query_len is {call.longest_query}, below {least}")
    room = call.num_seqs * call.capacity
    if call.cache_dtype == "int4" and room > XLA.int4.keys * call.num_tokens:
        reasons.append(f"int4 is dequantised first: {room} keys for {call.num_tokens} tokens")
    if call.head_dim != MEASURED_HEAD_DIM:
        reasons.append(f"measured ahead with head_dim {MEASURED_HEAD_DIM}, got {call.head_dim}")
    options = [option for option in call.set_options if option not in MEASURED]
    return reasons + [f"not measured ahead with {option}" for option in options]


def _is_ahead_with_short_queries(call) -> bool:
    """Over eight bits only if tiles are full: all keys are widened for each, with few rows too."""
    if call.cache_dtype is None:
        return _is_large(call) or _is_uneven(call)
    return _is_large(call) and call.longest_query * call.group >= ROWS


def _is_large(call) -> bool:
    """Whether there are so many keys that it is ahead from fewer queries a sequence on."""
    by, num_keys = call.crossings, call.num_seqs * call.capacity
    many = call.num_seqs >= by.mosaic_many_seqs and num_keys >= by.mosaic_many_keys
    return many and call.longest_query >= by.mosaic_many_query_len


def _is_uneven(call) -> bool:
    """Whether decodes of different lengths would leave a part of the device idle.

    There it is ahead, and no slower where lengths do not differ: with fewer decodes it starts too
    slowly, and more even out by themselves. In blocks of 128, of which it loads the last one
    whole, it is behind (64 of 512 to 4096 keys on an H100: 225 us, Triton's 211).
    """
    by, decodes = call.crossings, call.num_seqs * call.num_kv_heads
    some = by.mosaic_fewest_decodes <= decodes <= by.mosaic_most_decodes
    some = some and call.block_size <= LARGEST_DECODE_BLOCK
    return some and call.longest_query == 1 and call.capacity > by.mosaic_decode_keys


def _unsupported_sizes(call) -> list[str]:
    reasons = []
    if call.dtype not in DTYPES:
        reasons.append(f"it takes {' and '.join(DTYPES)}, got {call.dtype}")
    if call.head_dim % 64 or not 64 <= call.head_dim <= 256:
        reasons.append(f"head_dim must be 64, 128, 192 or 256, got {call.head_dim}")
        return reasons
    keys = 128 if call.head_dim <= 128 else 64
    if call.block_size % 8 or (keys % call.block_size and call.block_size % keys):
        size = call.block_size
        reasons.append(f"block_size must be 8, 16, 32, 64 or a multiple of {keys}, got {size}")
    return reasons


def _unsupported_bits(call) -> list[str]:
    if call.cache_dtype is None:
        return []
    reasons = []
    if call.cache_dtype == "int4":
        if (taken := dequantised_bytes(call)) > MOST_INT4_BYTES:
            reasons.append(
                f"cache_dtype: int4 is dequantised first, to at most {MOST_INT4_BYTES} bytes; "
                f"the tables have room for {taken}"
            )
        return reasons
    if call.cache_dtype not in CACHE_DTYPES:
        reasons.append(f"cache_dtype: it widens {', '.join(CACHE_DTYPES)}, got {call.cache_dtype}")
    if call.dtype != "bfloat16":
        reasons.append(f"cache_dtype: with queries of bfloat16, got {call.dtype}")
    if call.head_dim != 128:  # TMA puts rows at multiples of 128 bytes; 256 need more registers
        reasons.append(f"cache_dtype: with head_dim 128, got {call.head_dim}")
    return reasons


def _unsupported_cap(call) -> list[str]:
    cap = call.spec.logits_soft_cap
    if cap is not None and cap > LARGEST_CAP:
        return [f"logits_soft_cap must be at most {LARGEST_CAP:.0f}, got {cap}"]
    return []


def _unsupported_lines(call) -> list[str]:
    if call.parents and call.max_query_len > LONGEST_LINE:
        return [
            f"parents: each row has a bit for each new token, so max_query_len must be at most "
            f"{LONGEST_LINE}, got {call.max_query_len}"
        ]
    return []


def unsupported_device() -> list[str]:
    if (capability := _capability()) != "9.0":
        return [f"it needs compute capability 9.0 (Hopper), got {capability}"]
    return []


@functools.cache
def _capability() -> str:
    return str(jax.devices("gpu")[0].compute_capability)


def run(call: Call, query, cache, batch):
    """out and lse of a call; every element of both is written by the kernel."""
    return attend(call, query, cache, batch, jax.devices("gpu")[0].core_count)


@functools.partial(jax.jit, static_argnames=("call", "programs"))
def attend(call: Call, query, cache, batch, programs):
    """`run` for a GPU of so many multiprocessors, wherever this is traced."""
    if call.cache_dtype == "int4" or is_faster_dequantised(call):
        return attend_dequantised(call, query, cache, batch, programs)
    config = config_of(call, programs)
    query = jnp.pad(query, ((0, config.num_tokens - call.num_tokens), (0, 0), (0, 0)))
    lengths = batch.query_start_loc, batch.seq_lens
    dealt = split_kv if config.parts else tiles
    schedule, lines = dealt.schedule_of(config, *lengths), Lines()
    if batch.tree is not None:
        lines = lines_of(config, batch.tree, dealt.tiles_of(config, *lengths))
    slopes = jnp.asarray(call.spec.alibi_slopes or (0.0,), jnp.float32)
    arrays = query, cache.key, cache.value, scales_of(call, cache), batch.block_tables
    out, lse = attention(config, programs, *arrays, schedule, lines, slopes)
    tokens = slice(call.num_tokens)
    return out[tokens], by_token(config, *lengths, lse)[tokens] if call.return_lse else None


def attend_dequantised(call: Call, query, cache, batch, programs):
    """Per-head scales are factors on queries and results; others, on keys and values."""
    plain, dequantised, batch = dequantised_first(call, cache, batch)
    scales = Scales() if call.token_scales else Scales(cache.key_scale, cache.value_scale)
    query = scaled(query, scales.key, call.num_kv_heads)
    out, lse = attend(plain, query, dequantised, batch, programs)
    return scaled(out, scales.value, call.num_kv_heads), lse


def scales_of(call: Call, cache) -> Scales:
    """Those of tokens, or one for each KV head; None where nothing is held in eight bits."""
    scales = Scales(cache.key_scale, cache.value_scale)
    if call.cache_dtype is None or call.token_scales:
        return scales
    ones = jnp.ones(call.num_kv_heads, jnp.float32)
    return Scales(
        *(ones if scale is None else ones * as_read(scale).reshape(-1) for scale in scales)
    )


def config_of(call: Call, programs: int) -> KernelConfig:
    """The call's sizes; its queries are padded to one unit at least, and its window may be off.

    Keys are cut where the queries of every sequence fit into one tile.
    """
    sizes = call.num_heads, call.num_kv_heads, call.head_dim, call.num_blocks, call.block_size
    spec = dataclasses.replace(call.spec, sliding_window=call.window)
    num_tokens = max(UNIT, call.num_tokens)
    config = KernelConfig(
        num_tokens,
        *sizes,
        call.num_seqs,
        call.max_blocks,
        spec,
        call.return_lse,
        call.cache_dtype,
        call.token_scales,
        words=num_words(call.max_query_len) if call.parents else 0,
    )
    units = cdiv(call.longest_query, UNIT) * call.group
    if units > UNITS:
        return config
    return dataclasses.replace(config, units=units, parts=num_parts(call, programs))


def num_parts(call: Call, programs: int) -> int:
    """As many as there are programs for; a few less, if sequences of one length then stay whole.

    64 sequences of 4 heads took 130.4 us in 32 parts and 138.9 in 33, where a part ends within each
    sequence.
    """
    most = max(1, programs // call.num_kv_heads)
    enough = range(most, cdiv(15 * most, 16) - 1, -1)
    return next((parts for parts in enough if call.num_seqs % parts == 0), most)
