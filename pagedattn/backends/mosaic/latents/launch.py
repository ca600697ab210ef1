"""From a call to the kernel: what it takes, and its launch."""

import functools

import jax

from ...._dispatch.call import Call
from ....cache.quantise import scaled
from ..dense.launch import CACHE_DTYPES, unsupported_device
from .attention import attention
from .kernel_config import FEWEST_ROWS, HEAD_DIM, KEYS, ROWS, VALUE_DIM, KernelConfig
from .split_kv import schedule_of

SUPPORTS = ("scale", "causal", "value_dim", "return_lse", "cache_dtype", "token_scales")
MEASURED_HEADS = 8, 16, 32, 64, 128
MEASURED_BLOCKS = (16, 32, 64)


def refusals(call: Call) -> list[str]:
    """Why the kernel cannot run a call; empty when it can."""
    return _unsupported(call) + unsupported_device()


def slower_because(call: Call) -> list[str]:
    """Why another backend is likely faster: the rule of `backend=None`."""
    reasons, by = [], call.crossings
    if call.longest_query > 1:
        reasons.append(f"several queries a sequence: max_query_len is {call.longest_query}")
    if call.max_keys < by.latent_keys:
        reasons.append(f"short sequences: at most {call.max_keys} keys, below {by.latent_keys}")
    work = call.num_tokens * call.num_heads * call.max_keys
    many_heads = call.num_heads % ROWS == 0 and not call.cache_dtype
    if many_heads and work < by.latent_work:
        reasons.append(f"little work: {work} products of a query and a key, below {by.latent_work}")
    if call.num_heads not in MEASURED_HEADS:
        reasons.append(f"measured with 8, 16, 32, 64 and 128 heads, got {call.num_heads}")
    if call.block_size not in MEASURED_BLOCKS:
        reasons.append(f"not measured with blocks of {call.block_size}")
    return reasons


def _unsupported(call) -> list[str]:
    options = [option for option in call.set_options if option not in SUPPORTS]
    reasons = [f"{option}: not with values among the keys' columns" for option in options]
    if call.strides.value:
        reasons.append("value_dim: values of another width must be columns of the keys")
    if call.dtype != "bfloat16":
        reasons.append(f"queries of latents must be bfloat16, got {call.dtype}")
    if call.cache_dtype and call.cache_dtype not in CACHE_DTYPES:
        reasons.append(f"cache_dtype: it widens {', '.join(CACHE_DTYPES)}, got {call.cache_dtype}")
    if (call.head_dim, call.out_dim) != (HEAD_DIM, VALUE_DIM):
        reasons.append(
            f"latents must have {HEAD_DIM} columns, {VALUE_DIM} of them values, "
            f"got {call.head_dim} and {call.out_dim}"
        )
    if call.num_kv_heads != 1 or call.num_heads % FEWEST_ROWS:
        reasons.append(
            f"latents need one KV head and a multiple of {FEWEST_ROWS} query heads, "
            f"got {call.num_kv_heads} and {call.num_heads}"
        )
    if call.block_size % 8 or (KEYS % call.block_size and call.block_size % KEYS):
        reasons.append(
            f"block_size must be 8, 16, 32 or a multiple of {KEYS}, got {call.block_size}"
        )
    return reasons


def run(call: Call, query, cache, batch):
    """out and lse of a call; every element of both is written by the kernels."""
    return attend(call, query, cache, batch, jax.devices("gpu")[0].core_count)


@functools.partial(jax.jit, static_argnames=("call", "programs"))
def attend(call: Call, query, cache, batch, programs):
    """`run` for a GPU of so many multiprocessors, wherever this is traced."""
    config = config_of(call, programs)
    schedule = schedule_of(config, batch.query_start_loc, batch.seq_lens)
    by_token = call.token_scales
    of_tokens, of_all = (cache.key_scale.reshape(-1), None) if by_token else (None, cache.key_scale)
    query = scaled(query, of_all, 1)
    out, lse = attention(config, query, cache.key, of_tokens, batch.block_tables, schedule)
    return scaled(out, of_all, 1), lse.reshape(call.lse_shape) if call.return_lse else None


def config_of(call: Call, programs: int) -> KernelConfig:
    sizes = call.num_tokens, call.num_heads, call.num_blocks, call.block_size
    options = call.spec, programs, call.cache_dtype, call.token_scales
    return KernelConfig(*sizes, call.num_seqs, call.max_blocks, *options)
