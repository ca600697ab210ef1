"""Attention of an encoder-decoder model, step by step, on torch tensors made from JAX arrays.

    python examples/encoder_decoder.py

The encoder, the decoder's prefill, its cross-attention, then three decode steps run through
`TorchSDPABackendImpl` on caches that JAX allocated. Every result is compared with
`pagedattn.paged_attention` on the same values, and with the float64 oracle; the exit status is 1
if one differs by more than rounding.
"""

# Some of JAX's and NumPy's own functions are unknown to type checkers.
# pyright: reportUnknownMemberType=false

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pagedattn_interop import to_jax, to_torch
from torch import Tensor

from pagedattn import (
    AttentionSpec,
    BatchMetadata,
    KVCache,
    init_kv_cache,
    make_batch,
    paged_attention,
)
from pagedattn.testing import reference_attention
from pagedattn_torch import TorchSDPABackendImpl, TorchSDPAMetadata

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 8, 2, 64, 16
ENCODER_LENS, PROMPT_LENS = [37, 50, 9], [5, 1, 18]
NUM_DECODES = 3
TABLES, CROSS_TABLES = [[0, 1], [2, 3], [4, 5]], [[8, 9, 10], [11, 12, 13, 14], [15]]
TOLERANCE = 1e-5
Fresh = tuple[Array, Array | None, Array | None]  # query, and key and value unless cached


class Row(NamedTuple):
    """One attention call by torch: whether memory was shared, and its distance from the judges."""

    step: str
    attention: str
    query: str
    shared: bool
    from_jax: float
    from_oracle: float


class Decoder(NamedTuple):
    """The layer, its two caches, and the values that it is fed."""

    layer: TorchSDPABackendImpl
    own: KVCache[Array]
    cross: KVCache[Array]
    seeds: Iterator[int]


def main() -> int:
    layer = TorchSDPABackendImpl(NUM_HEADS, HEAD_DIM, num_kv_heads=NUM_KV_HEADS)
    sizes = (16, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM, jnp.float32)
    # The layer writes to the memory of these JAX arrays, so nothing else may use them.
    decoder = Decoder(layer, init_kv_cache(*sizes), init_kv_cache(*sizes), itertools.count())
    rows = [*prefill(decoder)]
    for step in range(NUM_DECODES):
        rows += decode(decoder, step)
    print(table(rows))
    return 0 if all(passed(row) for row in rows) else 1


def prefill(decoder: Decoder) -> Iterator[Row]:
    """The encoder, the prompts, and their cross-attention, which caches the encoder's keys."""
    meta = metadata(PROMPT_LENS, [0] * len(PROMPT_LENS))
    encoder = normal(decoder, sum(ENCODER_LENS))
    yield run(decoder, "prefill", "encoder", encoder, meta)
    yield run(decoder, "prefill", "decoder", normal(decoder, sum(PROMPT_LENS)), meta)
    query = normal(decoder, sum(PROMPT_LENS))[0]
    yield run(decoder, "prefill", "encoder_decoder", (query, *encoder[1:]), meta)


def decode(decoder: Decoder, step: int) -> Iterator[Row]:
    """One token a sequence; the encoder's keys are in the cache."""
    meta = metadata([1] * len(PROMPT_LENS), [n + step for n in PROMPT_LENS])
    for attention in ("decoder", "encoder_decoder"):
        query, key, value = normal(decoder, len(PROMPT_LENS))
        arrays = (query, key, value) if attention == "decoder" else (query, None, None)
        yield run(decoder, f"decode {step + 1}", attention, arrays, meta)


def metadata(query_lens: list[int], context_lens: list[int]) -> TorchSDPAMetadata:
    return TorchSDPAMetadata.from_lists(
        query_lens,
        context_lens,
        TABLES,
        block_size=BLOCK_SIZE,
        encoder_lens=ENCODER_LENS,
        cross_block_tables=CROSS_TABLES,
    )


def normal(decoder: Decoder, num_tokens: int) -> tuple[Array, Array, Array]:
    """New queries, keys and values as JAX arrays."""
    keys = jax.random.split(jax.random.key(next(decoder.seeds)), 3)
    shapes = [(num_tokens, count, HEAD_DIM) for count in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    query, key, value = map(jax.random.normal, keys, shapes)
    return query, key, value


def run(decoder: Decoder, step: str, attention: str, arrays: Fresh, meta: TorchSDPAMetadata) -> Row:
    """One call through the layer, compared with JAX and with the oracle."""
    cache = decoder.cross if attention == "encoder_decoder" else decoder.own
    query = to_torch(arrays[0])
    key, value = (None if array is None else to_torch(array) for array in arrays[1:])
    held = to_torch(cache)
    out = decoder.layer.forward(query, key, value, held, meta, attn_type=attention)
    tensors, sources = (query, key, value, held.key), (*arrays, cache.key)
    shared = all(
        tensor is None or array is None or tensor.data_ptr() == array.unsafe_buffer_pointer()
        for tensor, array in zip(tensors, sources, strict=True)
    )
    query, keys, batch, spec = judged(attention, arrays, cache, meta)
    by_jax = paged_attention(query, keys, batch, spec, backend="xla")
    exact = by_oracle(query, keys, batch, spec)
    ours = np.asarray(to_jax(out))
    from_jax, from_oracle = (
        float(np.abs(ours - np.asarray(other)).max()) for other in (by_jax, exact)
    )
    return Row(step, attention, str(list(query.shape)), shared, from_jax, from_oracle)


def by_oracle(
    query: Array, keys: KVCache[Array], batch: BatchMetadata[Array], spec: AttentionSpec
) -> np.ndarray:
    """The float64 result of a call."""
    return reference_attention(
        np.asarray(query),
        np.asarray(keys.key),
        np.asarray(keys.value),
        np.asarray(batch.block_tables),
        np.asarray(batch.seq_lens),
        np.asarray(batch.query_start_loc),
        spec,
    )[0]


def judged(
    attention: str, arrays: Fresh, cache: KVCache[Array], meta: TorchSDPAMetadata
) -> tuple[Array, KVCache[Array], BatchMetadata[Array], AttentionSpec]:
    """The same call for JAX: its own arrays, and the cache that the layer has just written."""
    spec = AttentionSpec(causal=attention == "decoder")
    query, key, value = arrays
    if attention != "encoder" or key is None or value is None:
        # A copy, since XLA may compute the comparison only after the layer's next write.
        tensors: KVCache[Tensor] = to_torch(cache)
        written: KVCache[Array] = to_jax(tensors, copy=True)
        return query, written, to_jax(meta.to_batch(BLOCK_SIZE, attention)), spec
    tables = [
        [*range(stop - n, stop)]
        for n, stop in zip(ENCODER_LENS, np.cumsum(ENCODER_LENS), strict=True)
    ]
    batch = make_batch(ENCODER_LENS, None, tables, key_lens=ENCODER_LENS, block_size=1)
    return query, KVCache(key[:, None], value[:, None]), batch, spec


def passed(row: Row) -> bool:
    return row.shared and max(row.from_jax, row.from_oracle) < TOLERANCE


def table(rows: list[Row]) -> str:
    """The parity table as text."""
    lines = [
        ("step", "attention", "query", "shared memory", "|torch - jax|", "|torch - float64|", "")
    ]
    for row in rows:
        errors = (f"{row.from_jax:.1e}", f"{row.from_oracle:.1e}")
        shared, verdict = "yes" if row.shared else "NO", "ok" if passed(row) else "OFF"
        lines.append((*row[:3], shared, *errors, verdict))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


if __name__ == "__main__":
    sys.exit(main())
