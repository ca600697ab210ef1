"""The tests of this folder in a process of four devices, and merge_across on these."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from some_devices import mesh_over

from pagedattn import merge_across, merge_states

on_cpu = pytest.mark.skipif(
    jax.device_count() > 1 or jax.default_backend() != "cpu",
    reason="the tests themselves run here, or cannot",
)


@pytest.mark.early
@on_cpu
def test_in_a_process_of_four_devices():
    """How many devices a CPU is must be said before JAX starts."""
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"
    plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
    command = [sys.executable, "-m", "pytest", "-q", *plugins, str(Path(__file__).parent)]
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def folded(out, lse):
    return functools.reduce(lambda a, b: merge_states(*a, *b), zip(out, lse, strict=True))


def on_devices(check_vma):
    mesh = mesh_over(4, "device")

    def merge(out, lse):
        return merge_across(out[0], lse[0], "device")

    specs = {"in_specs": PartitionSpec("device"), "out_specs": PartitionSpec()}
    return jax.shard_map(merge, mesh=mesh, **specs, check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
def test_results_and_gradients_are_those_of_the_folded_merge(check_vma):
    """The results leave shard_map as equal on all devices, which it checks by their types."""
    rng = np.random.default_rng(0)
    out = jnp.asarray(rng.standard_normal((4, 5, 2, 8)), jnp.float32)
    lse = jnp.asarray(rng.uniform(-9, 9, (4, 5, 2)), jnp.float32)
    lse = lse.at[:, 1].set(-jnp.inf).at[2].set(-jnp.inf)  # a row without keys, a device without

    def loss(merge, out, lse):
        out, lse = merge(out, lse)
        return (out**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum(), (out, lse)

    def of(merge):
        return jax.jit(jax.grad(functools.partial(loss, merge), (0, 1), has_aux=True))(out, lse)

    got, want = of(on_devices(check_vma)), of(folded)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_it_is_one_collective():
    """Each costs a decode as much as the other, however little it carries."""
    out, lse = jnp.ones((4, 2, 2, 8), jnp.bfloat16), jnp.ones((4, 2, 2))
    program = jax.jit(on_devices(True)).lower(out, lse).compile().as_text()
    collectives = r" (all-[a-z-]+?|reduce-scatter|collective-\w+)(?:-start)?\("
    assert re.findall(collectives, program) == ["all-gather"]
