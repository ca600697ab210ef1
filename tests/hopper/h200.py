"""Programs that XLA compiles for H200s, on a machine without one."""

import functools
import math
import re

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

COMPUTE_CAPABILITY, CORES = "9.0", 132
# What XLA's choices depend on: the chip of an H100, with more memory, and faster.
TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: {CORES}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
runtime_version {{ major: 13 }}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "NVIDIA H200"
"""


@functools.cache
def mesh_of(num_devices: int) -> Mesh:
    topology = topologies.get_topology_desc(
        "h200", platform="cuda", target_config=TARGET, topology=f"1x1x{num_devices}"
    )
    return Mesh(np.array(topology.devices), "heads")


def compiled(program, *arrays, num_devices=1, donate=(), options=None):
    """The program as `jax.jit` would compile it, for arrays of which each device has all."""
    sharding = NamedSharding(mesh_of(num_devices), PartitionSpec())

    def like(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    traced = jax.jit(program, donate_argnums=donate).trace(*jax.tree.map(like, arrays))
    return traced.lower().compile(options)


def computations_of(text: str) -> dict[str, str]:
    """The lines of each computation of a program, by its name."""
    return dict(re.findall(r"^%([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL))


def in_place_within_fusions(text: str) -> list[str]:
    """The calls of kernels that write in place, of those that XLA has made parts of fusions."""
    computations = computations_of(text)
    fused = set(re.findall(r" fusion\(.*calls=%([\w.-]+)", text))
    lines = [line for name in fused for line in computations[name].splitlines()]
    return [line for line in lines if "custom-call(" in line and "_aliasing=" in line]


def sizes_of_copies(text: str) -> list[int]:
    """How many elements each array has that XLA copies as it is."""
    copies = re.findall(r"= \(?\w+\[([\d,]*)\][^=]* copy(?:-start)?\(", text)
    return [math.prod(map(int, filter(None, shape.split(",")))) for shape in copies]


def kernels_of_loops(text: str) -> list[int]:
    """How many kernels, copies included, a turn of each `while` loop starts."""
    computations = computations_of(text)
    bodies = (computations[name] for name in re.findall(r" while\(.*body=%([\w.-]+)", text))
    return [len(re.findall(r" (?:fusion|custom-call|copy)\(", body)) for body in bodies]
