"""Products whose inputs lie on two GPUs, added by a kernel of ours instead of XLA's all-reduce.

What a decode adds up is small: most of the 21 us of XLA's all-reduce are waits of one stream for
another. Two GPUs of one process that reach each other's memory need one kernel in the stream of all
else (parallel/peer_kernel.py), which can add the residual and normalise as well. `refusals` says
where that cannot be, and `peers` then gives None: there XLA adds.
"""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from pagedattn import InvalidInputError, available_backends
from pagedattn.extend import cdiv, triton_call
from pagedattn_serving.families.decoder import Hidden

Features = Float[Array, "num_tokens _"]
Weight = Float[Array, "out in"]
MOST_ROWS = 256  # more tokens are added by XLA, which is faster where they are many
NUM_WARPS = 16
TURNS = 3  # rows of the memory for each of these
# What reads as empty in all dtypes: in those of 16 bits it is -0.0, in float32 less than any normal
# number. Zeros are pushed instead.
EMPTY = 0x80008000 - (1 << 32)
PARTS, FEW_ROWS = 4, 64  # terms of a product, if it has no more rows than a tile


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Peers:
    """Two devices and the memory by which their kernels exchange rows.

    Fields:
      addresses: a row a device: where its memory lies, and where that of its peer.
      memory: a row a device, of which only kernels know what it holds.
    """

    addresses: Int[Array, "2 4"]
    memory: Int[Array, "2 words"]
    mesh: Mesh = field(metadata={"static": True})

    def sum(self, x: Features, weight: Weight) -> Features:
        """`x @ weight.T` of inputs that are spread over the devices; everywhere the same."""
        return self._on_each(_sum, x, weight)

    def sum_and_norm(
        self, x: Features, weight: Weight, residual: Hidden, scale: Array, eps: float
    ) -> tuple[Hidden, Hidden]:
        """`residual + x @ weight.T`, and its RMSNorm."""
        return self._on_each(partial(_sum_and_norm, eps=eps), x, weight, residual, scale)

    def _on_each(self, function, x, weight, *others):
        self._require_room(len(x), len(weight))
        spread, everywhere = PartitionSpec(*self.mesh.axis_names), PartitionSpec()
        inputs = PartitionSpec(None, *spread)
        specs = inputs, inputs, *[everywhere] * len(others), spread, spread
        on_each = jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=everywhere)
        return on_each(x, weight, *others, self.addresses, self.memory)

    def _require_room(self, rows: int, columns: int) -> None:
        """A row that is too many, or too long, would be written over what is none of the kernel's.

        Raises:
          InvalidInputError: more rows or columns than the memory has.
        """
        most = words_of(self.memory)
        if rows > MOST_ROWS or columns > most:
            raise InvalidInputError(
                f"x must have at most {MOST_ROWS} rows and weight {most} outputs, got {rows} and "
                f"{columns}: let XLA add them, or give `peers` as many columns"
            )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Summed:
    """A weight spread along its inputs, for `x @ weight.T`."""

    weight: Weight
    peers: Peers

    @property
    def T(self) -> "Product":
        return Product(self)


@dataclass(frozen=True)
class Product:
    """The right side of `x @ weight.T`."""

    of: Summed

    def __rmatmul__(self, x: Features) -> Features:
        if len(x) > MOST_ROWS:
            return x @ self.of.weight.T  # by XLA's partitioner
        return self.of.peers.sum(x, self.of.weight)


def peers(mesh: Mesh, columns: int) -> Peers | None:
    """What adds up rows of so many columns on the devices of a mesh, if anything but XLA can."""
    if refusals(mesh):
        return None
    sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))
    memory = jax.jit(partial(empty_memory, columns), out_shardings=sharding)()
    lies = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    one, two = (lies[device] for device in mesh.devices.flat)
    addresses = np.array([[one, two], [two, one]], np.uint64).view(np.int32)
    return Peers(jax.device_put(addresses, sharding), jax.block_until_ready(memory), mesh)


def empty_memory(columns: int) -> Int[Array, "2 words"]:
    """Of both devices, for rows of up to 4 bytes a column: as peer_kernel.py lays it out."""
    words = cdiv(columns, 4) * 4
    turns = jnp.zeros((2, MOST_ROWS), jnp.int32)
    rows = jnp.full((2, TURNS * MOST_ROWS * words), EMPTY, jnp.int32)
    return jnp.concatenate([turns, rows], axis=1)


def words_of(memory: Int[Array, "_ words"]) -> int:
    """How many words a row has in a memory that was made so."""
    return (memory.shape[1] // MOST_ROWS - 1) // TURNS


def refusals(mesh: Mesh) -> list[str]:
    """Why the kernel cannot add for the devices of a mesh; empty if it can."""
    devices = list(mesh.devices.flat)
    if len(devices) != 2 or {device.platform for device in devices} != {"gpu"}:
        return [f"it adds what two GPUs have, the mesh is of {devices}"]
    if {device.process_index for device in devices} != {jax.process_index()}:
        return ["an address means nothing in another process"]
    if "triton" not in available_backends():
        return ["it needs Triton, and JAX for CUDA: pip install 'pagedattn[cuda]'"]
    pairs = permutations([device.local_hardware_id for device in devices])
    return [f"GPU {a} cannot reach GPU {b}" for a, b in pairs if not reaches(a, b)]


def reaches(ordinal: int, peer: int) -> bool:
    """Whether a GPU can use another's memory. If it can, JAX lets it, from its start on."""
    answer = ctypes.c_int(0)
    status = ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer(ctypes.byref(answer), ordinal, peer)
    return status == 0 and answer.value == 1


def in_parts(x: Features, weight: Weight) -> Float[Array, "parts num_tokens out"]:
    """Terms of `x @ weight.T`, each of some of the inputs, which the kernel adds as well.

    Few rows by a part of a weight are too few tiles for a GPU, so that XLA makes such terms itself,
    and then adds them by one more kernel.
    """
    parts = math.gcd(PARTS, x.shape[1]) if len(x) <= FEW_ROWS else 1
    terms = [array.reshape(len(array), parts, -1) for array in (x, weight)]
    return jnp.einsum("tpi,opi->pto", *terms, preferred_element_type=jnp.float32)


def _sum(x, weight, addresses, memory):
    arrays = in_parts(x, weight), addresses, memory
    return _started("sum_kernel", arrays, [x.dtype])[0]


def _sum_and_norm(x, weight, residual, scale, addresses, memory, eps):
    arrays = in_parts(x, weight), residual, scale, addresses, memory
    return tuple(_started("norm_kernel", arrays, [residual.dtype] * 2, EPS=eps))


def _started(name: str, arrays: tuple, dtypes: list, **constants: Any) -> Sequence[Array]:
    """The outputs of a kernel, which have these dtypes."""
    from pagedattn_serving.parallel import peer_kernel

    (parts, num_rows, columns), memory = arrays[0].shape, arrays[-1]
    constants |= {"PARTS": parts, "COLUMNS": columns, "PADDED": 1 << (columns - 1).bit_length()}
    constants |= {"ROWS": MOST_ROWS, "WORDS": words_of(memory), "EMPTY": EMPTY}
    outs = [jax.ShapeDtypeStruct((num_rows, columns), dtype) for dtype in dtypes]
    sizes = {"grid": (num_rows, 1, 1), "num_warps": NUM_WARPS, "num_stages": 1}
    return triton_call(getattr(peer_kernel, name), *arrays, outs=outs, **sizes, **constants)
