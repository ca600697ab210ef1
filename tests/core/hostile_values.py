"""Values that no argument expects, some made from those that are expected there."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import torch

# Not 2**31 - 1: as a size it is legal, and would ask for all memory.
PLAIN = (
    None, True, False, 0, -1, 1, 3, 97, 2**31, 2**40, 2**64, 10**30, -(2**31), -(2**40),
    0.0, 1.5, -2.0, float("nan"), float("inf"), -float("inf"), 1e300, 1 + 2j,
    "", "x", "float32", "xla", b"bytes", (), [], {}, set(), ..., NotImplemented, int, np.float32,
    [1, 2], [[1], [2, 3]], [[1], 2], [None], ["a"], [1.5], (2**40,), range(3), {"key": 1}, {1: [2]},
    np.int32(2), np.uint8(200), np.float32(2.0), np.bool_(True), np.longdouble(1),
    np.datetime64("2020-01-01"), np.timedelta64(3, "s"), jnp.float32, torch.float32, object,
)  # fmt: skip
MADE = (
    object,
    lambda: SimpleNamespace(shape=(2, 2), ndim=2, dtype="int32"),
    lambda: (x for x in [1, 2]),
    lambda: lambda: None,
    lambda: ValueError("a value"),
    lambda: memoryview(b"abcd"),
    lambda: bytearray(b"abcd"),
    lambda: np.array(None),
    lambda: np.array(3),
    lambda: np.array([1.0]),
    lambda: np.array(["a", "b"]),
    lambda: np.zeros(2, [("a", int), ("b", float)]),
    lambda: np.array([1, None, "x"], object),
    lambda: np.zeros(3, "M8[s]"),
    lambda: np.zeros(3, "m8[s]"),
    lambda: np.zeros(3, np.complex64),
    lambda: np.zeros(3, np.longdouble),
    lambda: np.zeros((0,)),
    lambda: np.zeros((0, 3), np.int32),
    lambda: np.zeros((2, 0), np.int64),
    lambda: np.ma.array([1, 2, 3], mask=[0, 1, 0]),
    lambda: np.array([2**63, 1], np.uint64),
    lambda: jnp.zeros(2, jnp.int4),
    lambda: jnp.zeros(2, jnp.float8_e4m3fn),
    lambda: jax.random.key(0),
    lambda: jax.ShapeDtypeStruct((2,), jnp.int32),
    lambda: deleted(jnp.arange(3)),
    lambda: {"a": jnp.zeros(2), "b": [jnp.ones(2)]},
    lambda: torch.tensor(3),
    lambda: torch.tensor([1.5, 2.0]),
    lambda: torch.zeros(2, dtype=torch.complex64),
    lambda: torch.zeros(2, dtype=torch.bool),
    lambda: torch.zeros(3, device="meta"),
    lambda: torch.zeros(3, dtype=torch.int32, device="meta"),
    lambda: torch.zeros(2, 2).to_sparse(),
    lambda: torch.zeros(2, 3, 4, requires_grad=True),
    lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
)
DTYPES = (
    "bool",
    "int8",
    "uint8",
    ">i4",
    "int64",
    "uint64",
    "float16",
    "float64",
    "complex64",
    "S4",
)


def deleted(array):
    array.delete()
    return array


def hostile(rng: np.random.Generator, good):
    """A value for an argument whose good value is known: another kind, or one changed a little."""
    if rng.random() < 0.4 and isinstance(good, np.ndarray | jax.Array | torch.Tensor):
        return changed_array(rng, good)
    if rng.random() < 0.2 and isinstance(good, list | tuple) and good:
        return changed_list(rng, good)
    values = (*PLAIN, *MADE)
    index = int(rng.integers(len(values)))
    return values[index] if index < len(PLAIN) else values[index]()


def changed_list(rng, good):
    """One element more, less, or another."""
    changed, at = list(good), int(rng.integers(len(good)))
    match rng.integers(4):
        case 0:
            changed.pop(at)
        case 1:
            changed.insert(at, hostile(rng, good[at]))
        case 2:
            changed[at] = hostile(rng, good[at])
        case _:
            changed[at] = [changed[at]]
    return changed


def changed_array(rng, good):
    """The same array in another framework, dtype, rank, length, layout or with wild entries."""
    back = convert_like(good)
    array = np.array(good.detach().float() if is_bf16(good) else good)
    if is_bf16(good):
        array = array.astype(jnp.bfloat16)
    kind = int(rng.integers(12))
    match kind:
        case 0:
            return array.astype(DTYPES[int(rng.integers(len(DTYPES)))])
        case 1:
            return back(array[None])
        case 2:
            return back(array.ravel()[0]) if array.size else array
        case 3:
            return back(array[:-1]) if array.ndim else array
        case 4:
            return back(np.concatenate([array, array])) if array.ndim else array
        case 5:
            return array[::-1] if array.ndim else array
        case 6:
            return np.ma.array(array)
        case 7:
            return array.astype(object)
        case 8:
            return array.astype(array.dtype.newbyteorder(">"))
        case 9:
            return back(array.swapaxes(0, -1)) if array.ndim else array
        case 10:
            return torch.tensor(array.astype(np.float32))
    return back(with_wild_entries(rng, array))


def with_wild_entries(rng, array):
    if not array.size or array.dtype.kind not in "iuf":
        return array
    wild = (-1, -5, 0, 97, 2**31 - 1, 2**40, -(2**40)) if array.dtype.kind in "iu" else (np.nan,)
    array = array.astype(np.int64) if array.dtype.kind in "iu" else array.copy()
    array.flat[int(rng.integers(array.size))] = wild[int(rng.integers(len(wild)))]
    return array


def is_bf16(array):
    return isinstance(array, torch.Tensor) and array.dtype is torch.bfloat16


def convert_like(good):
    if isinstance(good, torch.Tensor):
        return lambda array: torch.tensor(np.array(array))
    if isinstance(good, jax.Array):
        return jnp.asarray
    return lambda array: array
