"""Sums of two GPUs by a kernel of their own: it, the models around it, and where it cannot be."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.extend
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from pagedattn_serving.engine.generation import decode_loop, prefill, start
from pagedattn_serving.families.cohere import Cohere
from pagedattn_serving.families.forward import forward_dense
from pagedattn_serving.families.llama import Llama
from pagedattn_serving.families.pieces import rms_norm
from pagedattn_serving.families.qwen import Qwen2
from pagedattn_serving.parallel import all_reduce, peer_llama, tensor
from pagedattn_serving.parallel.all_reduce import Summed
from pagedattn_serving.parallel.peer_llama import by_peers
from test_tensor import NEW, PROMPTS, SIZES, mesh_of, with_biases
from tiny import TINY, tiny_params

from pagedattn import InvalidInputError

GPUS = jax.device_count() if jax.default_backend() == "gpu" else 0
two = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
no_gpus = pytest.mark.skipif(GPUS > 0, reason="is of devices that are none")


def by_psum(name, arrays, dtypes, **constants):
    """What the kernels compute, for `all_reduce._started` on devices that are no GPUs."""
    total = jax.lax.psum(arrays[0].sum(axis=0).astype(dtypes[0]), tensor.AXIS)
    if name == "sum_kernel":
        return [total]
    total = arrays[1] + total
    return [total, rms_norm(total, arrays[2], constants["EPS"])]


@pytest.fixture
def stood_in(monkeypatch):
    """The names of the kernels that were started."""
    if GPUS:
        pytest.skip("the kernels themselves run here")
    started = []

    def start(name, *arguments, **constants):
        started.append(name)
        return by_psum(name, *arguments, **constants)

    monkeypatch.setattr(all_reduce, "refusals", lambda mesh: [])
    monkeypatch.setattr(all_reduce, "_started", start)
    return started


@pytest.mark.skipif(jax.device_count() > 1, reason="runs once, in the process of one device")
def test_kernels_by_the_interpreter():
    pytest.importorskip("triton", minversion="3.5")
    pytest.importorskip("torch")
    path = Path(__file__).with_name("peers_interpreted.py")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(path)]
    # A kernel that waits for what does not come waits for ever.
    limit = {"timeout": 300, "check": False}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, **limit)
    assert done.stdout == "as expected\n", done.stdout + done.stderr


def generated(model, params, **sizes):
    """Tokens on one device, and on two."""
    sizes = SIZES | sizes
    state = start(params, model, PROMPTS, [0, 0, 0], **sizes)
    state = prefill(params, model, state, 0.0, 9)
    state = decode_loop(params, model, state, 0.0, NEW)
    rows = zip(state.tokens.tolist(), state.lengths.tolist(), PROMPTS, strict=True)
    one = [row[len(prompt) : length] for row, length, prompt in rows]
    return one, tensor.generate(mesh_of(2), model, params, PROMPTS, **sizes)


def various_norms():
    """Tiny parameters with norms that differ from each other."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(tiny_params())
    keys = jax.random.split(jax.random.key(5), len(leaves))
    norms = [jnp.exp(jax.random.normal(key, (TINY.hidden_size,))) for key in keys]
    named = zip(leaves, norms, strict=True)
    return tree.unflatten(norm if "norm" in path[-1].key else x for (path, x), norm in named)


@two
@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("most_rows", [256, 10], ids=["prefill by kernels", "prefill by XLA"])
def test_a_llama_adds_and_normalises_in_one(most_rows, stood_in, monkeypatch):
    for module in (all_reduce, peer_llama):
        monkeypatch.setattr(module, "MOST_ROWS", most_rows)
    one, both = generated(TINY, various_norms(), num_blocks=30 + (most_rows < 27))  # new programs
    assert one == both
    steps = 1 if most_rows < 27 else 2  # programs in which the tokens are few enough
    assert stood_in == ["norm_kernel"] * 2 * TINY.num_hidden_layers * steps


@two
@pytest.mark.usefixtures("exact_products")
def test_another_family_adds(stood_in):
    one, both = generated(*with_biases())
    assert one == both
    assert stood_in == ["sum_kernel"] * 4 * TINY.num_hidden_layers


@two
@pytest.mark.usefixtures("stood_in")
@pytest.mark.parametrize("kind", [Llama, Qwen2, Cohere])
def test_sums_of_one_memory_follow_from_one_another(kind):
    """XLA may run others at the same time; Cohere's attention and MLP are side by side."""
    types = {} if kind is Llama else {"layer_types": ("full_attention",) * 2}
    model, params = tensor.spread(mesh_of(2), kind(**vars(TINY) | types), tiny_params())
    traced = jax.make_jaxpr(lambda params: forward_dense(params, model, jnp.arange(5))[0])(params)
    array_of = dict(zip(traced.jaxpr.invars, map(id, jax.tree.leaves(params)), strict=True))
    behind, sums = {}, {}  # what each variable comes from; by memory
    for number, eqn in enumerate(traced.eqns):
        names = [x for x in eqn.invars if isinstance(x, jax.extend.core.Var)]
        before = set().union(*(behind.get(x, ()) for x in names))
        if eqn.primitive.name == "shard_map":
            *_, memory = names
            earlier = sums.setdefault(array_of[memory], [])
            assert before.issuperset(earlier)
            earlier.append(number)
        behind |= dict.fromkeys(eqn.outvars, before | {number})
    assert sum(map(len, sums.values())) == 2 * TINY.num_hidden_layers


@two
@pytest.mark.usefixtures("stood_in")
@pytest.mark.parametrize(("rows", "columns"), [(257, 24), (1, 25)])
def test_more_than_the_memory_holds_is_refused(rows, columns):
    add = all_reduce.peers(mesh_of(2), 24)
    assert add.sum(jnp.ones((256, 8)), jnp.ones((24, 8))).shape == (256, 24)
    with pytest.raises(InvalidInputError, match=r"256 rows and weight 24 outputs, got"):
        add.sum(jnp.ones((rows, 8)), jnp.ones((columns, 8)))


@two
@pytest.mark.usefixtures("stood_in")
def test_weights_that_lie_everywhere_are_not_added():
    model = replace(TINY, intermediate_size=41)
    layers = [layer | {"down": jnp.ones((24, 41))} for layer in tiny_params()["layers"]]
    spread, params = tensor.spread(mesh_of(2), model, tiny_params() | {"layers": layers})
    added = [name for name, x in params["layers"][0].items() if isinstance(x, Summed)]
    assert added == ["output"]
    assert type(spread) is Llama  # which norms by itself


@no_gpus
def test_elsewhere_xla_adds():
    mesh = mesh_of(min(2, jax.device_count()))
    assert "two GPUs" in all_reduce.refusals(mesh)[0]
    params = tiny_params()
    assert by_peers(mesh, TINY, params) == (TINY, params)


@two_gpus
@pytest.mark.usefixtures("exact_products")
def test_tokens_on_two_gpus():
    one, both = generated(TINY, various_norms())
    assert one == both


@two_gpus
@pytest.mark.parametrize("rows", [64, 256])
def test_sums_of_many_epochs(rows):
    """Bit by bit those of psum, with data that differ and devices that are late by turns."""
    mesh, columns, epochs, dtype = mesh_of(2), 4096, 500, jnp.bfloat16
    add = all_reduce.peers(mesh, columns)

    def program(addresses, memory):
        device = jax.lax.axis_index(tensor.AXIS)

        def epoch(i, carry):
            state, wrong = carry
            key = jax.random.fold_in(jax.random.key(0), 2 * i + device)
            part = state + jax.random.normal(key, (rows, columns), dtype)
            late = jnp.where(device == i % 2, i % 5, 0)
            part = jax.lax.fori_loop(0, late, lambda _, x: x * 1.5, part)
            terms = part.astype(jnp.float32) * jnp.float32([0.5, 0.25, 0.25])[:, None, None]
            (got,) = all_reduce._started("sum_kernel", (terms, addresses, memory), [dtype])
            # Sums of one memory must follow from one another.
            part, got = jax.lax.optimization_barrier((part, got))
            scale = jnp.linspace(0.5, 2, columns, dtype=dtype)
            arrays = part[None], state, scale, addresses, memory
            total, normed = all_reduce._started("norm_kernel", arrays, [dtype] * 2, EPS=1e-5)
            want = jax.lax.psum(part, tensor.AXIS)
            wrong += (got != want).sum() + (total != state + want).sum()
            # Rows of another dtype, and fewer columns, in the same memory.
            _, part = jax.lax.optimization_barrier((total, part))
            fine = part[:, : columns // 2].astype(jnp.float32)[None] / 3
            (got_fine,) = all_reduce._started("sum_kernel", (fine, addresses, memory), [fine.dtype])
            got, got_fine = jax.lax.optimization_barrier((got, got_fine))
            wrong += (got_fine != jax.lax.psum(fine[0], tensor.AXIS)).sum()
            far = abs(normed - rms_norm(state + want, scale, 1e-5)) > 0.05
            return 0.1 * got, wrong + far.sum()

        begin = jnp.zeros((rows, columns), dtype), jnp.int32(0)
        return jax.lax.fori_loop(0, epochs, epoch, begin)[1][None]

    here = PartitionSpec(tensor.AXIS)
    both = jax.shard_map(program, mesh=mesh, in_specs=(here, here), out_specs=here, check_vma=False)
    assert jax.jit(both)(add.addresses, add.memory).tolist() == [0, 0]
