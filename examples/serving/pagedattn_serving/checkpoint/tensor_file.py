"""Reads safetensors files, with numbers of eight bits too, which its own reader for JAX refuses."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import deserialize

from pagedattn import InvalidInputError

DTYPES = {
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E8M0": jnp.float8_e8m0fnu,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "I8": np.int8,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file by their names.

    Raises:
      InvalidInputError: A tensor is of another dtype than the known ones.
      safetensors.SafetensorError: The file is damaged.
    """
    return {name: _array(name, **stored) for name, stored in deserialize(path.read_bytes())}


def _array(name: str, dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    if dtype not in DTYPES:
        raise InvalidInputError(f"expected {name} in one of {', '.join(DTYPES)}, got {dtype}")
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)
