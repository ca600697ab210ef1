"""torch_call on a GPU: XLA's stream, capture into its graphs, and the memory that this needs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")
from pagedattn_interop import stream, to_torch, torch_call

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "gpu" or not torch.cuda.is_available(), reason="needs an NVIDIA GPU"
)
SIDE, LAYERS = 1024, 8


def churn(x, y):
    """`x @ y` by way of three temporaries, each as large as the arguments."""
    product = x @ y
    return torch.relu(product) + product.clamp(max=0)


def arguments():
    """Small integers, and a matrix that moves every column by one: products are exact."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.integers(-9, 9, (SIDE, SIDE)), jnp.float32)
    return x, jnp.roll(jnp.eye(SIDE), 1, axis=1)


def expected(x, count=LAYERS):
    return np.roll(np.asarray(x), count, axis=1)


@functools.cache
def layers(fn, capturable):
    """A jitted chain of calls; enough of them that XLA captures a graph when it may."""
    one = torch_call(fn, jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32), capturable=capturable)
    return jax.jit(lambda x, y: functools.reduce(lambda x, _: one(x, y), range(LAYERS), x))


def counting():
    """`churn` that counts how often Python is called."""
    calls = []

    def fn(x, y):
        calls.append(torch.cuda.is_current_stream_capturing())
        return churn(x, y)

    return fn, calls


@pytest.mark.parametrize("capturable", [False, True])
def test_same_as_torch(capturable):
    x, y = arguments()
    for _ in range(4):
        np.testing.assert_array_equal(layers(churn, capturable)(x, y), expected(x))


def test_a_captured_call_is_replayed_without_python():
    fn, calls = counting()
    x, y = arguments()
    for _ in range(4):
        layers(fn, True)(x, y).block_until_ready()
    assert any(calls), "XLA captured nothing"
    seen = len(calls)
    for _ in range(4):
        layers(fn, True)(x, y).block_until_ready()
    assert len(calls) == seen


def victims():
    """Memory that torch had free and hands out again, full of a value that nobody should touch."""
    torch.cuda.synchronize(device())
    torch.cuda.empty_cache()
    return [torch.full((SIDE, SIDE), 7.0, device=device()) for _ in range(200)]


def device():
    """Where JAX works by default, which need not be torch's current device."""
    return to_torch(jnp.zeros(1)).device


def replay_among_victims(fn):
    """Whether replays stay right, and leave alone what torch handed out after the capture."""
    x, y = arguments()
    run = layers(fn, True)
    for _ in range(4):
        run(x, y).block_until_ready()
    others = victims()
    right = all(np.array_equal(run(x, y), expected(x)) for _ in range(3))
    torch.cuda.synchronize(device())
    return right, all(bool((other == 7).all()) for other in others)


def test_replays_write_to_memory_of_their_own():
    fn, calls = counting()
    assert replay_among_victims(fn) == (True, True)
    assert any(calls)


def test_the_poison_test_catches_common_memory(monkeypatch):
    """Without the kept memory, a replay overwrites what torch gave to others."""
    monkeypatch.setattr(stream, "kept_memory", lambda device, pools: torch.cuda.device(device))
    fn, calls = counting()
    torch.cuda.empty_cache()
    assert replay_among_victims(fn) != (True, True)
    assert any(calls)


def test_independent_calls_in_one_graph():
    """They share the kept memory, so XLA must run them one after the other."""
    one = torch_call(churn, jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32), capturable=True)
    x, y = arguments()
    run = jax.jit(lambda x, y: [one(x + i, y) for i in range(2 * LAYERS)])
    for _ in range(8):
        for i, result in enumerate(run(x, y)):
            np.testing.assert_array_equal(result, expected(x + i, 1))


def test_runs_behind_the_jax_work_it_depends_on():
    """On XLA's stream, without waiting: the argument is still being computed when fn is called."""
    double = torch_call(lambda x: x * 2, jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32))

    @jax.jit
    def slow_then_double(x):
        return double(jax.lax.fori_loop(0, 200, lambda _, y: jnp.clip(y @ x, -1, 1), x))

    x = jnp.eye(SIDE)
    for _ in range(3):
        np.testing.assert_array_equal(slow_then_double(x), 2 * np.eye(SIDE))


@pytest.mark.parametrize("capturable", [False, True])
def test_updates_a_donated_argument_in_place(capturable):
    out = jax.ShapeDtypeStruct((4, SIDE), jnp.float32)

    def bump(x):
        x.add_(1)

    step = jax.jit(torch_call(bump, out, aliases={0: 0}, capturable=capturable), donate_argnums=0)
    x = jnp.zeros((4, SIDE))
    pointer = x.unsafe_buffer_pointer()
    for _ in range(5):
        x = step(x)
        assert x.unsafe_buffer_pointer() == pointer
    np.testing.assert_array_equal(x, np.full((4, SIDE), 5.0))


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("capturable", [False, True])
def test_several_devices(capturable):
    """Every device's calls run there, under shard_map too, captured at the same time or not."""
    mesh = jax.make_mesh((jax.device_count(),), ("rows",))
    spec = jax.sharding.PartitionSpec("rows")
    calls = []

    def fn(x):
        calls.append(torch.cuda.is_current_stream_capturing())
        return x * 2 + x.device.index

    one = torch_call(fn, jax.ShapeDtypeStruct((1, SIDE), jnp.float32), capturable=capturable)
    chain = functools.partial(functools.reduce, lambda x, _: one(x), range(LAYERS))
    run = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec))
    rows = np.arange(jax.device_count() * SIDE, dtype=np.float32).reshape(-1, SIDE)
    want = rows * 2**LAYERS + np.arange(len(rows))[:, None] * (2**LAYERS - 1)
    for _ in range(8):
        out = run(jax.device_put(rows, jax.sharding.NamedSharding(mesh, spec)))
        np.testing.assert_array_equal(out, want)
    assert any(calls) == capturable
