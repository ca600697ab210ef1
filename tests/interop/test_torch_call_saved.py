"""Programs that call torch, saved and loaded elsewhere; and those that JAX drops as they run."""

import textwrap

import pytest
from forked import run_forked

pytest.importorskip("torch")

START = """
import gc, pickle, sys, threading
import jax, jax.numpy as jnp
from jax.experimental import serialize_executable
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_compilation_cache", False)  # what came from it is saved in part
from pagedattn import AttentionSpec, init_kv_cache, make_batch, paged_attention
from pagedattn_interop import functions, torch_call
import torch
sys.modules["pretended"] = sys.modules["__main__"]
OUT, x = jax.ShapeDtypeStruct((3,), jnp.float32), jnp.ones(3)
def doubled(y):
    return y * 2
doubled.__module__ = "pretended"
def adding(number):
    return lambda y: y + number
def attend(scale):
    spec = AttentionSpec(scale=scale, causal=False)
    batch = make_batch([3], [0], [[1]], block_size=4)
    cache = init_kv_cache(2, 4, 1, 8, jnp.float32)
    key = cache.key.at[1, :, 0, 0].set(jnp.arange(4.0))
    cache = cache.with_planes(key, key)
    return lambda y: paged_attention(
        jnp.tile(y[:, None, None], (1, 1, 8)), cache, batch, spec, backend="sdpa")[:, 0, 0]
MADE = {
    "a closure": lambda: torch_call(adding(1), OUT),
    "another closure": lambda: torch_call(adding(2), OUT),
    "a function of a module": lambda: torch_call(doubled, OUT),
    "a function of torch": lambda: torch_call(torch.sin, OUT),
    "sdpa at scale 1": lambda: attend(1.0),
    "sdpa at scale -3": lambda: attend(-3.0),
}
"""
SAVED = """
saved = {}
for name, make in MADE.items():
    run = jax.jit(make()).lower(x).compile()
    try:
        saved[name] = serialize_executable.serialize(run), run(x).tolist()
    except AttributeError as error:
        assert "closure" in name and "local object" in str(error), error
pickle.dump(saved, open(sys.argv[1], "wb"))
"""
LOADED = """
results = [jax.jit(MADE[name]())(x).tolist() for name in sys.argv[2:]]
for name, (program, want) in pickle.load(open(sys.argv[1], "rb")).items():
    got = serialize_executable.deserialize_and_load(*program)(x).tolist()
    assert got == want, (name, got, want)
    print(name)
"""
NAMES = """
names = {}
for name, make in MADE.items():
    before = {*functions._by_name}
    call = jax.jit(make())
    kept = call, call(x)
    names[name], = {*functions._by_name} - before
print(names)
"""
LASTING = {"a function of a module", "sdpa at scale 1", "sdpa at scale -3"}


def process(code, *argv):
    code = textwrap.dedent(START) + textwrap.dedent(code)
    done = run_forked(code, "jax.numpy", "pagedattn_interop", argv=tuple(map(str, argv)))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


ORDERS = (
    (),
    ("another closure",),
    ("sdpa at scale -3",),
    ("sdpa at scale -3", "a function of torch", "another closure", "a closure"),
    ("sdpa at scale 1", "a function of a module"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "saved"
    process(SAVED, path)
    return path


@pytest.mark.parametrize("order", ORDERS)
def test_a_loaded_program_runs_its_own_function(saved, order):
    """Whatever the process that loads it has compiled before. Pickle refuses closures."""
    ran = process(LOADED, saved, *order).splitlines()
    assert len(ran) == 4, ran


def test_names_mean_the_same_in_every_process_or_nothing():
    """So that JAX's persistent cache never gives a program that calls another function."""
    first, second = (eval(process(NAMES)) for _ in range(2))
    assert len({*first.values(), *second.values()}) == 2 * len(first) - len(LASTING)
    assert {name for name in first if first[name] == second[name]} == LASTING


def test_a_program_is_dropped_while_it_runs():
    """`jax.clear_caches` frees what programs hold, and XLA may still be running one of them."""
    process("""
    begun, go, results = threading.Event(), threading.Event(), []
    def gate(y):
        begun.set()
        go.wait()
        return y
    gate = torch_call(gate, OUT)
    run = jax.jit(lambda y: attend(1.0)(gate(y)))
    go.set()
    want = run(x).tolist()  # the second call is C++ alone
    go.clear(), begun.clear()
    thread = threading.Thread(target=lambda: results.append(run(x)))
    thread.start()
    begun.wait()
    jax.clear_caches()
    gc.collect()
    go.set()
    thread.join()
    assert results[0].tolist() == want, results
    """)


def test_a_program_runs_when_nothing_holds_its_function():
    process("""
    one = functions.function_of(doubled, functions.Form(1, False, True, False, False))
    name = str(one)
    del one
    gc.collect()
    assert functions.named(name).fn is doubled
    """)
