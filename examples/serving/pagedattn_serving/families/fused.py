"""Weights of one input put together, for serving: fewer and larger products read them faster."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
import numpy as np

from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.families.pieces import GATE_UP, QUERY_KEY_VALUE, ends

FUSED = tuple("_".join(names) for names in (QUERY_KEY_VALUE, GATE_UP))


def fused(params: dict) -> dict:
    """The parameters with query, key and value as one weight a layer, and gate and up as one.

    The model computes the same with them. Weights that a layer does not have, and those of experts,
    stay as they are. A checkpoint is saved from parameters that are not fused.
    """
    return _by_layer(partial(_fused_layer, together=jnp.concatenate), params)


def fused_by_device(num_devices: int, params: dict) -> dict:
    """The same for several devices: `[num_devices, out / num_devices, in]`, on the host.

    Each device has its share of the outputs of each weight, so that no output crosses when they are
    split. Weights whose outputs do not divide by the devices stay as they are.
    """

    def shares(arrays: list) -> np.ndarray:
        parts = [np.asarray(a).reshape(num_devices, -1, *a.shape[1:]) for a in arrays]
        return np.concatenate(parts, axis=1)

    def of_layer(layer: dict) -> dict:
        divisible = {name: array for name, array in layer.items() if len(array) % num_devices == 0}
        others = {name: array for name, array in layer.items() if name not in divisible}
        return others | _fused_layer(divisible, shares)

    return _by_layer(of_layer, params)


def apart(model: Decoder, params: dict) -> dict:
    """The parameters as before `fused`, on the host where there was something to take apart."""
    heads, kv_heads = model.num_attention_heads, model.num_key_value_heads

    def of_layer(layer: dict) -> dict:
        for kind in ("", "_bias"):
            layer = _apart(layer, QUERY_KEY_VALUE, kind, (heads, kv_heads, kv_heads))
            layer = _apart(layer, GATE_UP, kind, (1, 1))
        return layer

    return _by_layer(of_layer, params)


def _by_layer(change: Callable[[dict], dict], params: dict) -> dict:
    return params | {"layers": [change(layer) for layer in params["layers"]]}


def _fused_layer(layer: dict, together: Callable) -> dict:
    for names in (QUERY_KEY_VALUE, GATE_UP):
        for kind in ("_bias", ""):  # the weights say whether they are of experts
            layer = _joined(layer, names, kind, together)
    return layer


def _joined(layer: dict, names: tuple[str, ...], kind: str, together: Callable) -> dict:
    """The layer with one array, or one bias, of these names in place of them, if it has them."""
    parts = [layer[name + kind] for name in names if name + kind in layer]
    if len(parts) < len(names) or any(layer[name].ndim > 2 for name in names):
        return layer
    rest = {name: array for name, array in layer.items() if name not in {n + kind for n in names}}
    return rest | {"_".join(names) + kind: together(parts)}


def _apart(layer: dict, names: tuple[str, ...], kind: str, sizes: tuple[int, ...]) -> dict:
    """The layer with arrays of these names in place of the one that they were joined to."""
    joined = "_".join(names) + kind
    if joined not in layer:
        return layer
    parts = np.split(np.asarray(layer[joined]), ends(len(layer[joined]), sizes))
    rest = {name: array for name, array in layer.items() if name != joined}
    return rest | {name + kind: part for name, part in zip(names, parts, strict=True)}
