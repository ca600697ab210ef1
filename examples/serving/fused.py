"""Weights of one input put together, for serving: fewer and larger products read them faster."""

import jax.numpy as jnp

from serving.families.pieces import GATE_UP, QUERY_KEY_VALUE


def fused(params: dict) -> dict:
    """The parameters with query, key and value as one weight a layer, and gate and up as one.

    The model computes the same with them. Weights that a layer does not have, and those of experts,
    stay as they are. A checkpoint is saved from parameters that are not fused.
    """
    return params | {"layers": [fused_layer(layer) for layer in params["layers"]]}


def fused_layer(layer: dict) -> dict:
    for names in (QUERY_KEY_VALUE, GATE_UP):
        layer = _joined(_joined(layer, names, "_bias"), names)
    return layer


def _joined(layer: dict, names: tuple[str, ...], kind: str = "") -> dict:
    """The layer with one array, or one bias, of these names in place of them, if it has them."""
    parts = [layer[name + kind] for name in names if name + kind in layer]
    if len(parts) < len(names) or any(layer[name].ndim > 2 for name in names):
        return layer
    rest = {name: array for name, array in layer.items() if name not in {n + kind for n in names}}
    return rest | {"_".join(names) + kind: jnp.concatenate(parts)}
