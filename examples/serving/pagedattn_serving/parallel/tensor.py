"""Tensor parallel: heads spread over the devices of a mesh, and the weights by which they are made.

The program is that of one device (engine/generation.py). Where its arrays lie makes it one for
many: `spread` says so for the weights, `start_over` for the caches, and all else lies everywhere.
XLA's partitioner then splits the matrix products and adds the sums over devices; two GPUs that can
add faster by a kernel of their own do (parallel/peer_llama.py). It cannot split attention, whose
kernels are not XLA's, so `OverHeads` says by `jax.shard_map` that a device attends with its own
heads alone: no data crosses there.

The devices of a mesh may belong to several processes: examples/multi_process.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from pagedattn import AttentionSpec, BatchMetadata, InvalidInputError, KVCache, UnsupportedError
from pagedattn_serving.engine.generation import Generation, decode_loop, prefill, start
from pagedattn_serving.families.decoder import Decoder, Heads
from pagedattn_serving.families.forward import Operands, cached_attention
from pagedattn_serving.families.fused import FUSED, apart, fused_by_device
from pagedattn_serving.parallel.peer_llama import BY_INPUT, by_peers

AXIS = "tensor"
EVERYWHERE, FIRST, SECOND = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)
HEADS, PAGES = SECOND, PartitionSpec(None, None, AXIS)  # of tokens, of a cache
# Weights are [out, in]. Of these a device has some outputs, and the entries of a bias for them;
# those that are fused are [devices, out, in].
BY_OUTPUT = ("embedding", "lm_head", "gate", "up", *FUSED)


@dataclass(frozen=True)
class OverHeads:
    """`cached_attention` on all devices of a mesh, each with heads and a cache of its own."""

    mesh: Mesh

    def __call__(
        self,
        operands: Operands,
        cache: KVCache,
        batch: BatchMetadata,
        spec: AttentionSpec,
        backend: str | None = None,
    ) -> tuple[Heads, KVCache]:
        if spec.alibi_slopes is not None:
            raise UnsupportedError("alibi_slopes: a device would need those of its own heads")
        attend = partial(cached_attention, spec=spec, backend=backend)
        ins = Operands._make((HEADS, HEADS, HEADS, FIRST)), PAGES, EVERYWHERE
        spread = jax.shard_map(attend, mesh=self.mesh, in_specs=ins, out_specs=(HEADS, PAGES))
        return spread(operands, cache, batch)


def spread(mesh: Mesh, model: Decoder, params: dict) -> tuple[Decoder, dict]:
    """The model and its parameters for the devices of a mesh, which repeat scarce KV heads.

    Weights of one input are put together for each device (families/fused.py), also where they were
    together for one.
    A weight of which the axis does not divide by the devices, as that of a vocabulary of odd size,
    lies everywhere.

    Raises:
      InvalidInputError: query heads that cannot be dealt out evenly, or KV heads.
      UnsupportedError: a model with latent caches.
    """
    model, params = with_kv_heads_for(mesh.size, model, apart(model, params))
    params = fused_by_device(mesh.size, params)

    def put(path, array: Array) -> Array:
        spec = spec_of(path[-1].key)
        divides = all(n % mesh.size == 0 for n, axis in zip(array.shape, spec) if axis)  # noqa: B905  (a spec may be shorter)
        sharding = NamedSharding(mesh, spec if divides else EVERYWHERE)
        host = np.asarray(array)
        return jax.make_array_from_callback(array.shape, sharding, host.__getitem__)

    return by_peers(mesh, model, jax.tree_util.tree_map_with_path(put, params))


def spec_of(name: str) -> PartitionSpec:
    """How the parameter of this name is spread."""
    if name.removesuffix("_bias") in BY_OUTPUT:
        return FIRST
    return SECOND if name in BY_INPUT else EVERYWHERE


def with_kv_heads_for(num_devices: int, model: Decoder, params: dict) -> tuple[Decoder, dict]:
    """The same model with every KV head repeated, so that each device has one of its own.

    A query head reads KV head `h // (num_heads // num_kv_heads)`: repeats that stand side by side
    leave it the same keys.
    """
    if model.init_cache(1, 1, jnp.float32).value is None:
        raise UnsupportedError("a latent cache has one head, which all devices would need")
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    if heads % num_devices or (kv_heads % num_devices and num_devices % kv_heads):
        raise InvalidInputError(
            f"{heads} query heads and {kv_heads} KV heads cannot be dealt out evenly to "
            f"{num_devices} devices"
        )
    repeats = max(1, num_devices // kv_heads)

    def repeated(array: Array) -> np.ndarray:
        by_head = np.asarray(array).reshape(kv_heads, model.head_dim, *array.shape[1:])
        return np.repeat(by_head, repeats, axis=0).reshape(-1, *array.shape[1:])

    def is_by_head(name: str, array: Array) -> bool:
        of_all = name == "key_norm" and array.size > model.head_dim  # else it is the same of each
        return of_all or name in ("key", "value", "key_bias", "value_bias")

    def of_layer(layer: Mapping[str, Any]) -> dict:
        return {n: repeated(array) if is_by_head(n, array) else array for n, array in layer.items()}

    layers = [of_layer(layer) for layer in params["layers"]]
    return replace(model, num_key_value_heads=kv_heads * repeats), params | {"layers": layers}


def start_over(mesh: Mesh, params: dict, model: Decoder, *prompts_and_seeds, **sizes) -> Generation:
    """`generation.start` on the devices of a mesh: no device ever holds a whole cache."""
    everywhere, pages = (NamedSharding(mesh, spec) for spec in (EVERYWHERE, PAGES))
    begin = partial(start, params, model, *prompts_and_seeds, **sizes)
    shardings = jax.tree.map(lambda _: everywhere, jax.eval_shape(begin))
    shardings = replace(shardings, caches=jax.tree.map(lambda _: pages, shardings.caches))
    return jax.jit(begin, out_shardings=shardings)()


def generate(
    mesh: Mesh, model: Decoder, params: dict, prompts: list[list[int]], **sizes: int
) -> list[list[int]]:
    """The likeliest tokens after each prompt; `sizes` are those of `generation.start`."""
    attend, seeds = OverHeads(mesh), [0] * len(prompts)
    model, params = spread(mesh, model, params)
    state = start_over(mesh, params, model, prompts, seeds, **sizes)
    longest = max(map(len, prompts))
    state = prefill(params, model, state, 0.0, longest, attend=attend)
    state = decode_loop(params, model, state, 0.0, sizes["max_new_tokens"], attend=attend)
    replicate = jax.jit(lambda *arrays: arrays, out_shardings=NamedSharding(mesh, EVERYWHERE))
    tokens, lengths = map(np.asarray, replicate(state.tokens, state.lengths))
    rows = zip(tokens.tolist(), lengths, prompts, strict=True)
    return [row[len(prompt) : length] for row, length, prompt in rows]
