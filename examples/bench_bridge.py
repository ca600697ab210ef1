"""What a torch function costs when XLA calls it, by the size of its argument: it should be flat.

python examples/bench_bridge.py
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import torch

from interop import torch_call

CALLS = 2000
OUT = jax.ShapeDtypeStruct((1,), jnp.float32)
FUNCTIONS = {"nothing": lambda x, counter: counter, "one addition": lambda x, counter: counter + 1}


def microseconds_a_call(function, megabytes: int) -> float:
    """Of a compiled loop in which each call needs the last one's result."""
    call = torch_call(function, OUT)
    array = jnp.zeros(megabytes << 18, jnp.float32)
    loop = jax.jit(
        lambda x: jax.lax.fori_loop(0, CALLS, lambda _, counter: call(x, counter), jnp.zeros(1))
    )
    times = []
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(loop(array))
        times.append(time.perf_counter() - start)
    return float(np.median(times[1:])) / CALLS * 1e6  # the first one compiled


def main():
    print(f"jax {jax.__version__}, torch {torch.__version__}, on {jax.devices()[0].device_kind}")
    for name, function in FUNCTIONS.items():
        for megabytes in (1, 64, 1024):
            microseconds = microseconds_a_call(function, megabytes)
            print(f"{name:>12}, {megabytes:>5} MB: {microseconds:5.1f} us a call")


if __name__ == "__main__":
    main()
