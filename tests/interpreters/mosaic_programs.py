"""Several programs of one kernel, for JAX's GPU interpreter: their clocks, and semaphores.

The interpreter runs programs one after another, in the order of the grid. Our programs wait only
for those before them, so a signal that is not there by then never comes.
"""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as host
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state.types import AbstractRef
from mosaic_products import on_host

from pagedattn.backends.mosaic.latents.eight_bits.operands import LARGEST_WEIGHT

MOST = 32  # programs of a kernel: clocks have a fixed size


class Programs(memory.GPUSharedMemory):
    """Each program has places of its own in the clocks.

    JAX begins each with all clocks at zero: what two programs do would be ordered by chance.
    """

    program = -1

    def reset_per_cluster_state(self):
        self.program += 1
        if self.program == 0:
            self.signals = collections.defaultdict(list)  # of each semaphore, the senders' clocks
        if self.program > MOST:
            raise RuntimeError(f"more than {MOST} programs: take a smaller case")
        places = len(self.all_concurrent_threads)
        self.vector_clock_size = (MOST + 1) * places + self.num_tma_threads
        super().reset_per_cluster_state()

    def thread_to_vc_position(self, thread):
        places = len(self.all_concurrent_threads)
        return self.program * places + super().thread_to_vc_position(thread)

    def get_next_tma_thread_id(self):
        return MOST * len(self.all_concurrent_threads) + super().get_next_tma_thread_id()


def get_global(interpreter, eqn, token):
    """A name, the same in all threads and programs: they are one jaxpr."""
    return token, [jnp.int32(id(eqn) % np.iinfo(np.int32).max)]


def semaphore_signal(interpreter, eqn, token, *operands):
    name, transforms, value, *_ = jax.tree.unflatten(eqn.params["args_tree"], operands)
    operands = {"name": name, "place": place_of(transforms), "value": value}
    return on_host(interpreter, token, signal, **operands)


def semaphore_wait(interpreter, eqn, token, *operands):
    name, transforms, value, decrement = jax.tree.unflatten(eqn.params["args_tree"], operands)
    operands = {"name": name, "place": place_of(transforms), "value": value}
    return on_host(interpreter, token, await_signal, decrement=decrement, **operands)


def place_of(transforms):
    return [index for transform in transforms for index in transform.indices]


def signal(shared, thread, name, place, value):
    clock = shared.incr_clock(thread) if shared.detect_races else None
    shared.signals[int(name), *map(int, place)] += [clock] * int(value)


def await_signal(shared, thread, name, place, value, decrement):
    sent = shared.signals[int(name), *map(int, place)]
    if len(sent) < value:
        raise RuntimeError("DEADLOCK: no program before this one has signalled")
    if shared.detect_races:
        with shared.lock:
            for clock in sent:
                shared.clocks[thread].update(clock)
    if decrement:
        del sent[: int(value)]


def weights_as_rows(weights):
    """Column `4 i + 2 j + k` has the weights of key `4 i + 2 k + j`."""
    return weights.reshape(-1, 2, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape).T


def values_as_rows(numbers):
    """Matrix `i` has columns `i` and `i + 4` of every eight, of half the values."""
    keys = numbers.reshape(2, 2, 2, 2, -1).transpose(0, 1, 3, 2, 4)
    columns = keys.reshape(len(numbers), 4, 8, 2, 4).transpose(4, 1, 3, 2, 0)
    return tuple(columns.reshape(4, 64, len(numbers)).astype(jnp.float16))


def columns_in_order(*matrices):
    columns = jnp.stack(matrices).reshape(4, 4, 2, 8, -1).transpose(4, 1, 3, 2, 0)
    return columns.reshape(columns.shape[0], -1)


def masked(numbers, seen):
    return jnp.where(jnp.repeat(seen, 8, axis=1) != 0, numbers, jnp.zeros_like(numbers))


INLINE = {  # what the functions in MLIR compute
    "together": lambda: (),
    "if_any_row": lambda sums, kept: tuple(x * kept[:, None] for x in sums),
    "if_any_column": lambda sums, kept: tuple(x * kept for x in sums),
    "gathered": lambda array, *indices: array[indices],
    "from_int8": lambda numbers: numbers.astype(jnp.float16),
    "weights_as_rows": weights_as_rows,
    "values_as_rows": values_as_rows,
    "masked": masked,
    "columns_in_order": columns_in_order,
    "too_large": lambda sizes: (sizes > 2.0**LARGEST_WEIGHT).any().astype(jnp.int32),
    "largest_of_rows": lambda matrix, scratch: matrix.max(axis=0),
    "total_of_rows": lambda matrix, scratch: matrix.sum(axis=0),
}
COMMITTING = ("too_large",)  # as `commit_smem` does


def inline_mgpu(interpreter, eqn, token, *operands):
    """MLIR cannot be interpreted: it is not tested here."""
    arguments, structure = [], eqn.params["pytree_args"]
    count = structure.num_leaves
    views = jax.tree.unflatten(eqn.params["pytree_ref_transforms"], operands[count:])
    for var, value, view in zip(eqn.invars[:count], operands[:count], views, strict=True):
        if isinstance(var.aval, AbstractRef):
            token, value = read(interpreter, eqn, token, var.aval, value, view)
        arguments.append(value)
    name = eqn.params["mgpu_fn"].__name__
    if name in COMMITTING:
        token, _ = on_host(interpreter, token, lambda shared, thread: shared.commit_smem(thread))
    function = INLINE[name]
    return token, jax.tree.leaves(function(*jax.tree.unflatten(structure, arguments)))


def read(interpreter, eqn, token, aval, ref, view):
    """The values of a reference."""
    ref, transforms = jaxpr_interpret.resolve_ref(aval, ref, view)
    whole = aval.inner_aval
    return host.call_get(
        token=token,
        result_shape_and_dtype=functools.reduce(lambda a, t: t.transform_type(a), view, whole),
        mesh_location=interpreter.mesh_location,
        thread=interpreter.thread,
        allocation_key_as_array=ref,
        transforms=transforms,
        source_info=eqn.source_info,
    )
