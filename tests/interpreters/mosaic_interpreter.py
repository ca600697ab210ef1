"""JAX's GPU interpreter, with the rules that it lacks for our kernels. Importing this installs it.

In a process of its own: classes of JAX are replaced, and XLA must have enough threads before its
CPU client starts, as each thread of a program that waits at a barrier keeps one of XLA's busy. With
two, as on two cores, programs hang.
"""

import logging
import os
import threading
import time
import types

os.environ["NPROC"] = "32"

import jax
from jax._src import core
from jax._src.pallas import primitives
from jax._src.pallas.mosaic_gpu import primitives as gpu
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as host
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret, params
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.state import discharge
from mosaic_memory import Races, SharedResults, share_memory
from mosaic_products import Products, run_state, wgmma, wgmma_load, wgmma_store, wgmma_wait
from mosaic_programs import Programs, get_global, inline_mgpu, semaphore_signal, semaphore_wait

# From interpreter, equation, token and operands to the token and a list of results.
RULES = {
    gpu.wgmma_ref_p: wgmma,
    gpu.wgmma_wait_p: wgmma_wait,
    gpu.wgmma_accumulator_deref_p: wgmma_load,
    gpu.wgmma_accumulator_store_p: wgmma_store,
    discharge.run_state_p: run_state,
    primitives.get_global_p: get_global,
    gpu.semaphore_signal_p: semaphore_signal,
    gpu.semaphore_wait_p: semaphore_wait,
    gpu.inline_mgpu_p: inline_mgpu,
}
PATIENCE = 30  # looks, a second apart, after which threads that do nothing will do nothing
AT_WORK = 0.1  # seconds of a processor: to look whether there is work takes a hundredth


class Interpreter(jaxpr_interpret.JaxprInterpreter):
    def interpret(self, jaxpr, token, *args):
        """Equation by equation: by the rules above, or by JAX's interpreter."""
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], args, strict=True))

        def read(var):
            return var.val if isinstance(var, core.Literal) else env[var]

        for eqn in jaxpr.eqns:
            if rule := RULES.get(eqn.primitive):
                token, outs = rule(self, eqn, token, *map(read, eqn.invars))
                env |= zip(eqn.outvars, outs, strict=True)
            else:
                token = self._by_jax(eqn, token, env)
        return token, [read(var) for var in jaxpr.outvars]

    def _by_jax(self, eqn, token, env):
        """Its results are added to `env`."""
        named = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
        ins = {var: env[var] for var in eqn.invars if not isinstance(var, core.Literal)}
        one = {"constvars": [], "invars": [*ins], "eqns": [eqn], "outvars": named}
        token, outs = super().interpret(types.SimpleNamespace(**one), token, *ins.values())
        env |= zip(named, outs, strict=True)
        return token


class Memory(Products, Programs, SharedResults):
    pass


class Patient(threading.Condition):
    """In place of conditions that wait for ever, those of barriers: gives up when all threads wait.

    Some may still be compiling their part, for half a minute on a busy machine: the process is then
    at work. Python's condition does not say whether it was notified while a look came to its end.
    """

    notified = 0

    def notify(self, n=1):
        self.notified += 1
        super().notify(n)

    def wait(self, timeout=None):
        notified, looks, worked = self.notified, 0, time.process_time()
        while not super().wait(1) and self.notified == notified:
            looks += 1  # not seconds: a machine may stand still for a while
            if time.process_time() - worked > AT_WORK:
                looks, worked = 0, time.process_time()
            if looks > PATIENCE:
                raise RuntimeError(f"DEADLOCK: no thread has done anything, {PATIENCE} times")
        return True


# Both users of these classes look them up by the names of their modules.
memory.GPUSharedMemory, jaxpr_interpret.JaxprInterpreter = Memory, Interpreter
host.GPURaceDetectionState, host._tag_ref_union = Races, share_memory
memory.threading = types.SimpleNamespace(**vars(threading) | {"Condition": Patient})
# It would print the traceback of every thread that ends because another one has failed.
logging.getLogger("jax._src.callback").setLevel(logging.CRITICAL)
# For all that follows: around each call it would be a context anew, and the kernel traced twice.
# Copies of one thread that shared one of these pseudo-threads would look ordered.
params.set_gpu_interpret_mode(
    params.InterpretGPUParams(detect_races=True, num_tma_threads_per_device=64)
)


def interpreted(function, *args):
    """The results of a function whose kernels are interpreted, or the first error of theirs."""
    host.reset_gpu_interpret_mode_state()
    return jax.block_until_ready(function(*args))
