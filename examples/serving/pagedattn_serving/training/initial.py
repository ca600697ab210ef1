"""Where training starts: random parameters of a Llama."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from pagedattn_serving.families.llama import Llama


def init_params(model: Llama, key: PRNGKeyArray) -> dict:
    """Random float32 parameters; the last weights of each residual branch start smaller."""
    embed_key, head_key, *layer_keys = jax.random.split(key, model.num_hidden_layers + 2)
    params = {
        "embedding": _normal(embed_key, (model.vocab_size, model.hidden_size)),
        "layers": [_init_layer(model, key) for key in layer_keys],
        "norm": jnp.ones(model.hidden_size),
    }
    if not model.tie_word_embeddings:
        params["lm_head"] = _normal(head_key, (model.vocab_size, model.hidden_size))
    return params


def large_params(model: Llama, key: PRNGKeyArray) -> dict:
    """Parameters so large that what an untrained model chooses is far from ties.

    What it chooses then depends on what is attended to: wrong attention gives other tokens.
    """
    return jax.tree.map(lambda weights: 8 * weights, init_params(model, key))


def _init_layer(model: Llama, key: PRNGKeyArray) -> dict:
    hidden, inner = model.hidden_size, model.intermediate_size
    heads, kv_heads = (
        count * model.head_dim for count in (model.num_attention_heads, model.num_key_value_heads)
    )
    shapes = {
        "query": (heads, hidden),
        "key": (kv_heads, hidden),
        "value": (kv_heads, hidden),
        "output": (hidden, heads),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    branch_scale = (2 * model.num_hidden_layers) ** -0.5
    scales = {"output": branch_scale, "down": branch_scale}
    keys = jax.random.split(key, len(shapes))
    normal = {
        name: scales.get(name, 1.0) * _normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return normal | {"attention_norm": jnp.ones(hidden), "mlp_norm": jnp.ones(hidden)}


def _normal(key: PRNGKeyArray, shape: tuple[int, int]):
    return 0.02 * jax.random.normal(key, shape)
