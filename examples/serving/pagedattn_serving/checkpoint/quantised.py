"""Reads quantised checkpoints: their weights are numbers again once they are loaded."""

from collections.abc import Iterator, Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import BFloat16, Float, Float8e4m3fn, Float32, UInt8

from pagedattn import InvalidInputError
from pagedattn.extend import cdiv

# After the name of a weight: the two that stand for it in MXFP4, and what FP8 has beside it.
BLOCKS, SCALES, SCALE = "_blocks", "_scales", "_scale_inv"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NIBBLES = np.concatenate([E2M1, -E2M1])
PAIRS = np.stack([np.tile(NIBBLES, 16), np.repeat(NIBBLES, 16)], axis=1)  # by byte, the low first
FP8 = np.dtype(jnp.float8_e4m3fn)
Tensors = Mapping[str, np.ndarray]


def dequantised(tensors: Tensors, settings: Mapping) -> Iterator[tuple[str, np.ndarray]]:
    """Names and tensors, where each weight is one tensor of numbers, without scales.

    Args:
      tensors: a checkpoint's, by name.
      settings: the `quantization_config` of its `config.json`; empty if it has none.

    Raises:
      InvalidInputError: Scales are missing, stand alone, or are not such as their weight needs.
    """
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith((SCALES, SCALE))}
    for name in [name for name in tensors if name not in scales]:
        weight, tensor = name.removesuffix(BLOCKS), tensors[name]
        if weight != name:
            yield weight, from_mxfp4(tensor, _of(weight, scales, SCALES))
        elif tensor.dtype == FP8 or name + SCALE in scales:
            own, sizes = _of(name, scales, SCALE), _block_sizes(name, settings)
            _require_scales(name, tensor, own, sizes)
            yield name, from_fp8(tensor, own, sizes)
        else:
            yield name, tensor
    if scales:
        raise InvalidInputError(f"expected a weight beside {min(scales)}, but no file has it")


def from_mxfp4(
    blocks: UInt8[np.ndarray, "experts out in_blocks 16"],
    scales: UInt8[np.ndarray, "experts out in_blocks"],
) -> BFloat16[np.ndarray, "experts in out"]:
    """Weights in MXFP4, exactly: each 32 along the inputs are of four bits, with a power of two."""
    exponents = scales.astype(np.int32)[..., None] - 127
    values = np.ldexp(PAIRS[blocks].reshape(*scales.shape, 32), exponents)
    return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2).astype(jnp.bfloat16)


def from_fp8(
    weight: Float8e4m3fn[np.ndarray, "*experts out in"],
    scales: Float[np.ndarray, "*experts out_blocks in_blocks"],
    sizes: tuple[int, int],
) -> Float32[np.ndarray, "*experts out in"]:
    """Weights in FP8, each times the scale of its block of `sizes`; the last blocks may be cut."""
    out, inputs = weight.shape[-2:]
    by_row = scales.astype(np.float32).repeat(sizes[0], axis=-2)[..., :out, :]
    return weight.astype(np.float32) * by_row.repeat(sizes[1], axis=-1)[..., :inputs]


def _of(weight: str, scales: dict[str, np.ndarray], suffix: str) -> np.ndarray:
    """A weight's scales, which are taken out of all."""
    if weight + suffix not in scales:
        raise InvalidInputError(f"expected {weight}{suffix} beside {weight}, but no file has it")
    return scales.pop(weight + suffix)


def _block_sizes(weight: str, settings: Mapping) -> tuple[int, int]:
    sizes = settings.get("weight_block_size")
    if not isinstance(sizes, list) or [type(n) for n in sizes] != [int, int] or min(sizes) < 1:
        raise InvalidInputError(
            f"expected two sizes of blocks for {weight}, as weight_block_size of the config's "
            f"quantization_config, got {sizes!r}"
        )
    return sizes[0], sizes[1]


def _require_scales(name: str, weight: np.ndarray, scales: np.ndarray, sizes: tuple) -> None:
    """Raises InvalidInputError if not each block of a weight has one finite scale."""
    grid = (*weight.shape[:-2], *map(cdiv, weight.shape[-2:], sizes))
    expected = f"expected {name} in {FP8} and {name}{SCALE} in floats of {grid}"
    if (weight.dtype, scales.shape) != (FP8, grid) or not jnp.issubdtype(scales.dtype, np.floating):
        given = f"{weight.dtype}, {scales.dtype} of {scales.shape}"
        raise InvalidInputError(f"{expected}, a scale for each block of {sizes}, got {given}")
    if not np.isfinite(scales.astype(np.float32)).all():
        raise InvalidInputError(f"{expected}, got some that are not finite")
