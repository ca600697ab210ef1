"""Pieces that the layers of several families share."""

from itertools import accumulate

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Features = Float[Array, "*tokens _"]
Weight = Float[Array, " size"]
QUERY_KEY_VALUE, GATE_UP = ("query", "key", "value"), ("gate", "up")


def linear(layer: dict, name: str, x: Features) -> Features:
    """`x @ weight.T`, and the bias where the layer has one."""
    return biased(layer, name, x @ layer[name].T)


def linears(
    layer: dict, names: tuple[str, ...], x: Features, sizes: tuple[int, ...]
) -> list[Features]:
    """Several linear maps of x, whose numbers of outputs are in the proportions of `sizes`.

    They are one product if their weights are fused (families/fused.py): `[out, in]`, or `[devices,
    out, in]`. Each device then splits its own outputs, which lie side by side with the others'.
    """
    fused = "_".join(names)
    if fused not in layer:
        return [linear(layer, name, x) for name in names]
    *outs, size = layer[fused].shape
    out = x @ layer[fused].reshape(-1, size).T  # of three axes XLA would transpose a copy
    out = biased(layer, fused, out.reshape(*x.shape[:-1], *outs))
    parts = jnp.split(out, ends(outs[-1], sizes), axis=-1)
    return [part.reshape(*x.shape[:-1], -1) for part in parts]


def biased(layer: dict, name: str, out: Features) -> Features:
    return out + layer[f"{name}_bias"] if f"{name}_bias" in layer else out


def ends(width: int, sizes: tuple[int, ...]) -> list[int]:
    """Where all but the last of several parts end that are together so wide.

    >>> ends(48, (4, 1, 1))
    [32, 40]
    """
    return [width * size // sum(sizes) for size in accumulate(sizes[:-1])]


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
    gate, up = linears(layer, GATE_UP, x, (1, 1))
    return linear(layer, "down", activation(gate) * up)


def gelu_tanh(x: Features) -> Features:
    return jax.nn.gelu(x, approximate=True)


def head_logits(params: dict, hidden: Features) -> Features:
    """Logits in float32, by the head or by the embedding that it is tied to."""
    head = params.get("lm_head", params["embedding"])
    return jnp.matmul(hidden, head.T, preferred_element_type=jnp.float32)
