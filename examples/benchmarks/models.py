"""The models of the serving benchmarks: the shipped one, or sizes with random weights."""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, PRNGKeyArray
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint
from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.families.fused import FUSED, fused
from pagedattn_serving.families.llama import Llama
from pagedattn_serving.parallel.tensor import spec_of

from benchmarks.random_arrays import random_array

SCALE = 0.02  # of random weights
SHAPES = {
    "llama-8b": Llama(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope_theta=500000.0,
    ),
}
NAMES = (SHIPPED.name, *SHAPES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model a benchmark takes, of which sizes, run how, and where its figures go."""
    parser.add_argument("--shape", choices=NAMES, default=NAMES[0], help="the model")
    parser.add_argument("--size", type=size, action="append", default=[], help="e.g. vocab_size=64")
    parser.add_argument("--backend", help="default: the library's choice")
    parser.add_argument("--out", type=Path, help="write the figures there, as JSON")


def size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    return name, int(value)


def model_called(name: str, changes: dict[str, int]) -> tuple[Decoder, dict]:
    """A model without stop tokens and its parameters, with sizes changed if weights are random."""
    if name == SHIPPED.name:
        model, params = load_checkpoint(SHIPPED)
        return replace(model, eos_token_id=None, **changes), fused(params)
    model = replace(SHAPES[name], **changes)
    return model, random_params(model)


def random_params(model: Llama, dtype=jnp.bfloat16) -> dict:
    """Random parameters, fused, made on the device a layer at a time."""
    vocab, *layers = jax.random.split(jax.random.key(0), model.num_hidden_layers + 1)
    embedding, head = jax.random.split(vocab)
    table = (model.vocab_size, model.hidden_size)
    return {
        "embedding": random_array(embedding, table, dtype, scale=SCALE),
        "lm_head": random_array(head, table, dtype, scale=SCALE),
        "layers": [random_layer(key, model, dtype) for key in layers],
        "norm": jnp.ones(model.hidden_size, dtype),
    }


@partial(jax.jit, static_argnums=(1, 2))
def random_layer(key: PRNGKeyArray, model: Llama, dtype) -> dict[str, Array]:
    hidden, inner = model.hidden_size, model.intermediate_size
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
    shapes = {
        "query_key_value": ((heads + 2 * kv_heads) * model.head_dim, hidden),
        "output": (hidden, heads * model.head_dim),
        "gate_up": (2 * inner, hidden),
        "down": (hidden, inner),
    }
    keys = jax.random.split(key, len(shapes))
    weights = zip(keys, shapes.items(), strict=True)
    layer = {name: random_array(key, shape, dtype, scale=SCALE) for key, (name, shape) in weights}
    return layer | {name: jnp.ones(hidden, dtype) for name in ("attention_norm", "mlp_norm")}


def spread_params(mesh: Mesh, model: Llama) -> dict:
    """Random parameters for the devices of a mesh, fused, each made on those that hold it."""
    shapes = jax.eval_shape(partial(random_params, model))
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))

    def made(path, leaf, key):
        name, shape = path[-1].key, leaf.shape
        if name in FUSED:
            shape = mesh.size, shape[0] // mesh.size, *shape[1:]
        sharding = NamedSharding(mesh, spec_of(name))
        return random_array(key, shape, sharding=sharding, scale=SCALE)

    return tree.unflatten(made(*at, key) for at, key in zip(leaves, keys, strict=True))
