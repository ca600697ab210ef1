"""From a call to the kernel: what it takes, and its launch."""

import functools

import jax
import jax.numpy as jnp

from ...registry import platform_of
from .kernel import attention
from .lse import by_token
from .shape import UNIT, Shape
from .tiles import tiles_of

DTYPES = ("bfloat16", "float16")


def refusals(query, cache, batch, spec) -> list[str]:
    """Why the kernel cannot run a call; empty when it can."""
    return _unsupported_arrays(query, cache) + _unsupported_device(query)


def _unsupported_arrays(query, cache) -> list[str]:
    reasons = []
    if str(query.dtype) not in DTYPES:
        reasons.append(f"it takes {' and '.join(DTYPES)}, got {query.dtype}")
    if cache.head_dim % 64 or not 64 <= cache.head_dim <= 256:
        reasons.append(f"head_dim must be 64, 128, 192 or 256, got {cache.head_dim}")
        return reasons
    keys = 128 if cache.head_dim <= 128 else 64
    if cache.block_size % 8 or (keys % cache.block_size and cache.block_size % keys):
        reasons.append(
            f"block_size must be 8, 16, 32 or a multiple of {keys}, got {cache.block_size}"
        )
    return reasons


def _unsupported_device(query) -> list[str]:
    if (platform := platform_of(query)) != "gpu":
        return [f"it needs arrays on a CUDA device, got them on {platform}"]
    if (capability := _capability()) != "9.0":
        return [f"it needs compute capability 9.0 (Hopper), got {capability}"]
    return []


@functools.cache
def _capability() -> str:
    return str(jax.devices("gpu")[0].compute_capability)


def run(query, cache, batch, spec, return_lse):
    """out and lse of a call; every element of both is written by the kernel."""
    if not query.size:
        return query, jnp.full(query.shape[:2], -jnp.inf, jnp.float32)
    programs = jax.devices("gpu")[0].core_count
    return attend(query, cache, batch, spec, return_lse, programs)


@functools.partial(jax.jit, static_argnames=("spec", "return_lse", "programs"))
def attend(query, cache, batch, spec, return_lse, programs):
    """`run` for a GPU of so many multiprocessors, wherever this is traced."""
    if short := max(0, UNIT - len(query)):
        query = jnp.pad(query, ((0, short), (0, 0), (0, 0)))
    shape = shape_of(query, cache, batch, spec, return_lse)
    lengths = batch.query_start_loc, batch.seq_lens
    tiles, count = tiles_of(shape, *lengths)
    slopes = jnp.asarray(spec.alibi_slopes or (0.0,), jnp.float32)
    arrays = query, cache.key, cache.value, batch.block_tables.astype(jnp.int32)
    out, lse = attention(shape, programs, *arrays, tiles, count, slopes)
    tokens = slice(len(query) - short)
    return out[tokens], by_token(shape, *lengths, lse)[tokens] if return_lse else None


def shape_of(query, cache, batch, spec, return_lse) -> Shape:
    num_tokens, num_heads, head_dim = query.shape
    sizes = num_tokens, num_heads, cache.num_kv_heads, head_dim, cache.num_blocks, cache.block_size
    return Shape(*sizes, batch.num_seqs, batch.max_blocks, spec, return_lse)
