"""Rules for products of warpgroups and their accumulators, for JAX's GPU interpreter.

A product reads its operands after it is issued, up to when it is awaited, as a thread of its own:
so the race detector sees a slot that is released too early. JAX reads at once, and unseen; it takes
no left operand from registers, and has no rules to store to an accumulator or to `run_state` one.
"""

import collections
import functools

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as host
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state.types import AbstractRef
from mosaic_memory import REGS

TOKEN = host.TOKEN_SHAPE_DTYPE
TREES = "acc_transforms_tree", "a_transforms_tree", "b_transforms_tree"


def on_host(interpreter, token, function, *, result=None, **operands):
    """Calls `function(shared memory, thread, **operands)` when the kernel runs: its result, if any.

    Returns the token, and a list of the results of the primitive.
    """

    @host.fail_on_exception
    def call(*, token, thread, **operands):
        out = function(host._get_shared_memory(), thread, **operands)
        return token if result is None else (token, out)

    kinds = TOKEN if result is None else (TOKEN, result)
    got = callback.io_callback(call, kinds, token=token, thread=interpreter.thread, **operands)
    return (got, []) if result is None else (got[0], [got[1]])


class Products(memory.GPUSharedMemory):
    """Products of each thread that are issued and not yet awaited, in their order."""

    def reset_per_cluster_state(self):
        in_flight = [key for keys in vars(self).get("issued", {}).values() for key, _ in keys]
        if in_flight:
            raise RuntimeError(f"a program ends before its products are awaited: {in_flight}")
        self.issued = collections.defaultdict(collections.deque)  # accumulators and clocks
        super().reset_per_cluster_state()

    def await_products(self, thread, count: int):
        """Awaits the oldest products, until only so many are in flight."""
        while len(self.issued[thread]) > count:
            _, clock = self.issued[thread].popleft()
            if self.detect_races:
                with self.lock:
                    self.clocks[thread].update(clock)

    def accumulator(self, thread, key_as_array):
        """Where an accumulator is, of which no product is in flight."""
        key = memory.HostAllocationKey.from_array(key_as_array)
        if any(key == other for other, _ in self.issued[thread]):
            raise RuntimeError(
                f"RACE DETECTED\n  an accumulator is used before its product is awaited: {key}"
            )
        return key, self.access(key, ())


def wgmma(interpreter, eqn, token, acc, *operands):
    sides, leaves = [*operands[:2]], operands[2:]
    trees = [eqn.params[name] or jax.tree.structure(()) for name in TREES]
    _, *views = jax.tree.unflatten(jax.tree_util.treedef_tuple(trees), leaves)
    avals = [var.aval for var in eqn.invars[1:3]]
    in_memory = [isinstance(aval, AbstractRef) for aval in avals]
    for i in filter(in_memory.__getitem__, (0, 1)):
        sides[i], views[i] = jaxpr_interpret.resolve_ref(avals[i], sides[i], views[i])
    function = functools.partial(multiply, in_memory=in_memory, source_info=eqn.source_info)
    return on_host(interpreter, token, function, acc=acc, sides=sides, views=views)


def multiply(shared, thread, acc, sides, views, *, in_memory, source_info):
    clock = shared.incr_clock(thread) if shared.detect_races else None
    if clock:
        clock.inc(shared.get_next_tma_thread_id())
    a, b = (
        operand(shared, thread, clock, side, view, source_info) if is_ref else side
        for is_ref, side, view in zip(in_memory, sides, views, strict=True)
    )
    key = memory.HostAllocationKey.from_array(acc)
    access = shared.access(key, ())
    sums = shared.get_buffer_content(key, access, thread)[0]
    with np.errstate(all="ignore"):  # keys that no query sees may hold anything
        # In float64: in float32 NumPy's rounding depends on the place of a row among the others.
        sums = (sums + np.float64(a) @ np.float64(b)).astype(sums.dtype)
    shared.store_buffer_content(key, access, sums, thread)
    shared.issued[thread].append((key, clock))


def operand(shared, thread, clock, key_as_array, view, source_info):
    """The values of an operand in memory; tensor cores read by the proxy of asynchronous copies."""
    key = memory.HostAllocationKey.from_array(key_as_array)
    access = shared.access(key, jax.tree.map(int, host._remove_noop_transforms(view)))
    if clock:
        smem = clock.async_smem_clock.copy()
        host.get_races().check_read(thread, smem, key, access, source_info=source_info)
    return shared.get_buffer_content(key, access, thread, increment_clock=False)[0]


def load(shared, thread, acc, wait):
    if wait is not None:
        shared.await_products(thread, wait)
    return shared.get_buffer_content(*shared.accumulator(thread, acc), thread)[0]


def store(shared, thread, acc, value):
    shared.store_buffer_content(*shared.accumulator(thread, acc), value, thread)


def wgmma_load(interpreter, eqn, token, acc):
    function = functools.partial(load, wait=eqn.params["wait_n"])
    return on_host(interpreter, token, function, result=eqn.outvars[0].aval, acc=acc)


def wgmma_store(interpreter, eqn, token, acc, value):
    token, _ = on_host(interpreter, token, store, acc=acc, value=value)
    return token, [value]


def wgmma_wait(interpreter, eqn, token):
    function = functools.partial(Products.await_products, count=eqn.params["n"])
    return on_host(interpreter, token, function)


def run_state(interpreter, eqn, token, *operands):
    """Values become accumulators of this thread, awaited at the end; refs remain what they are."""
    refs = [isinstance(var.aval, AbstractRef) for var in eqn.invars]
    keys = []
    for value, is_ref in zip(operands, refs, strict=True):
        token, key = (token, value) if is_ref else allocate(interpreter, token, value)
        keys.append(key)
    token, _ = interpreter.interpret(eqn.params["jaxpr"], token, *keys)
    results = []
    for key, is_ref, var in zip(keys, refs, eqn.invars, strict=True):
        token, result = (token, key) if is_ref else read_out(interpreter, token, key, var.aval)
        results.append(result)
    return token, results


def allocate(interpreter, token, value):
    token, request = host.call_make_allocation_request_array(
        token=token, compute_unit=interpreter.thread, memory_space_id=REGS
    )
    where = interpreter.mesh_location, interpreter.thread
    return host.call_allocate_buffer(
        token, *where, allocation_request_as_array=request, value=value
    )


def read_out(interpreter, token, key, aval):
    """The awaited value of an accumulator, which is no more."""
    function = functools.partial(load, wait=0)
    token, (result,) = on_host(interpreter, token, function, result=aval, acc=key)
    where = interpreter.mesh_location, interpreter.thread
    return host.call_deallocate_buffer(token, *where, key), result
