"""Reads quantised checkpoints: their weights are numbers again once they are loaded."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, UInt8

BLOCKS, SCALES = "_blocks", "_scales"  # after the name of the weight that they stand for
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NIBBLES = np.concatenate([E2M1, -E2M1])
PAIRS = np.stack([np.tile(NIBBLES, 16), np.repeat(NIBBLES, 16)], axis=1)  # by byte, the low first


def dequantised(tensors: dict[str, Array]) -> dict[str, Array]:
    """The tensors, with a weight in place of each two that are its blocks and its scales."""
    names = [name.removesuffix(BLOCKS) for name in tensors if name.endswith(BLOCKS)]
    packed = {name + part for name in names for part in (BLOCKS, SCALES)}
    whole = {name: tensor for name, tensor in tensors.items() if name not in packed}
    weights = {name: from_mxfp4(tensors[name + BLOCKS], tensors[name + SCALES]) for name in names}
    return whole | weights


def from_mxfp4(
    blocks: UInt8[Array, "experts out in_blocks 16"], scales: UInt8[Array, "experts out in_blocks"]
) -> BFloat16[Array, "experts in out"]:
    """Weights in MXFP4, exactly: each 32 along the inputs are of four bits, with a power of two."""
    exponents = np.asarray(scales, np.int32)[..., None] - 127
    values = np.ldexp(PAIRS[np.asarray(blocks)].reshape(*scales.shape, 32), exponents)
    return jnp.asarray(values.reshape(*scales.shape[:2], -1).swapaxes(1, 2), jnp.bfloat16)
