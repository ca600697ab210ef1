"""Pieces that the layers of several families share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Features = Float[Array, "*tokens _"]
Weight = Float[Array, " size"]
QUERY_KEY_VALUE, GATE_UP = ("query", "key", "value"), ("gate", "up")


def linear(layer: dict, name: str, x: Features) -> Features:
    """`x @ weight.T`, and the bias where the layer has one."""
    out = x @ layer[name].T
    return out + layer[f"{name}_bias"] if f"{name}_bias" in layer else out


def linears(layer: dict, names: tuple[str, ...], x: Features, split) -> list[Features]:
    """Several linear maps of x: by one product if their weights are fused (serving/fused.py).

    Its outputs are then split as `jnp.split` does by `split`.
    """
    fused = "_".join(names)
    if fused in layer:
        return jnp.split(linear(layer, fused, x), split, axis=-1)
    return [linear(layer, name, x) for name in names]


def biases(names: dict[str, str], *biased: str) -> dict[str, str]:
    """The checkpoint's names of the biases that belong to some of its weights."""
    return {f"{name}_bias": names[name].removesuffix("weight") + "bias" for name in biased}


def rms_norm(x: Features, weight: Weight, eps: float) -> Features:
    """RMSNorm, computed in float32 whatever the dtype of x."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (weight * normed).astype(x.dtype)


def layer_norm(x: Features, weight: Weight, bias: Weight, eps: float) -> Features:
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    return (weight * centred * jax.lax.rsqrt(variance + eps) + bias).astype(x.dtype)


def gated_mlp(layer: dict, x: Features, activation) -> Features:
    gate, up = linears(layer, GATE_UP, x, 2)
    return linear(layer, "down", activation(gate) * up)


def gelu_tanh(x: Features) -> Features:
    return jax.nn.gelu(x, approximate=True)


def head_logits(params: dict, hidden: Features) -> Features:
    """Logits in float32, by the head or by the embedding that it is tied to."""
    head = params.get("lm_head", params["embedding"])
    return jnp.matmul(hidden, head.T, preferred_element_type=jnp.float32)
