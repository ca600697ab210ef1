"""What becomes of the functions that XLA calls: how many, how long, how they fail, and the end."""

import dataclasses
import gc
import subprocess
import sys
import textwrap
import weakref

import jax
import jax.numpy as jnp
import pytest
from forked import run_forked

torch = pytest.importorskip("torch")
from pagedattn_interop import torch_call

from pagedattn import InvalidInputError

OUT = jax.ShapeDtypeStruct((3,), jnp.float32)
MANY = 1100  # jax-tvm-ffi registers 1024 functions at most


START = """
    import gc, sys, threading, time, weakref
    import jax, jax.numpy as jnp
    from pagedattn_interop import torch_call
    jax.config.update("jax_platforms", "cpu")
    OUT = jax.ShapeDtypeStruct((3,), jnp.float32)
    x = jnp.zeros(3)
    """


def program(code: str) -> str:
    """Code after the imports that it needs."""
    return "\n".join([textwrap.dedent(START), textwrap.dedent(code)])


def alone(code: str) -> subprocess.CompletedProcess:
    """Runs code in a process of its own."""
    return run_forked(program(code), "jax.numpy", "pagedattn_interop")


def assert_done(done):
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def adding(i):
    return lambda x: x + i


def test_more_functions_than_there_are_registrations():
    calls = [torch_call(adding(i), OUT) for i in range(MANY)]
    run = jax.jit(lambda x: [call(x) for call in calls[:: MANY - 1]])
    assert [int(y[0]) for y in run(jnp.zeros(3))] == [0, MANY - 1]


def test_a_function_that_was_never_called_is_freed():
    fn = adding(1)
    seen, call = weakref.ref(fn), torch_call(fn, OUT)
    del fn
    assert seen() is not None
    del call
    gc.collect()
    assert seen() is None


def test_equal_functions_are_one_registration():
    """So that a method, which is made anew at each access, is traced and compiled once."""

    class Model:
        def forward(self, x):
            return x + 1

    model = Model()
    programs = [jax.make_jaxpr(torch_call(model.forward, OUT))(jnp.zeros(3)) for _ in range(2)]
    assert str(programs[0]) == str(programs[1])


def test_functions_are_freed_with_the_programs_that_call_them():
    done = alone("""
        def program(i):
            def fn(y):
                return y + i
            seen.append(weakref.ref(fn))
            return jax.jit(lambda x: torch_call(fn, OUT)(x))  # only the program holds the function

        def alive():
            gc.collect()
            return [ref() is not None for ref in seen]

        seen = []
        kept, compiled = program(0), program(1).lower(x).compile()
        dropped = program(2)(x), program(3), torch_call(lambda y: y, OUT)(x)
        assert kept(x).tolist() == [0, 0, 0]
        jax.clear_caches()
        del dropped
        assert alive() == [True, True, False, False], alive()
        assert (kept(x)[0], compiled(x)[0]) == (0, 1)
        del kept, compiled
        jax.clear_caches()
        assert alive() == [False] * 4, alive()
        """)
    assert_done(done)


def test_a_call_leaves_nothing_behind():
    done = alone("""
        def pages():
            return int(open("/proc/self/statm").read().split()[1])

        one = torch_call(lambda y: y, OUT)
        run = jax.jit(lambda x: jax.lax.fori_loop(0, 100_000, lambda _, y: one(y), x))
        run(x).block_until_ready()
        before = pages()
        run(x).block_until_ready(), run(x).block_until_ready()
        assert pages() - before < 256, pages() - before  # a number as attribute: 800 pages
        """)
    assert_done(done)


class Unprintable(Exception):
    def __str__(self):
        raise KeyError("no text")


class Unnameable(Exception):
    """Its notes are no list, and printing it fails in every way."""

    __notes__ = 3

    def __str__(self):
        raise SystemExit

    __repr__ = __str__


def error(kind, *args):
    def fn(x):
        raise kind(*args)

    return fn


ERRORS = {
    "a lone surrogate": (error(ValueError, "half \ud800 a pair"), "half"),
    "no text": (error(Unprintable), "Unprintable"),
    "no text, no repr": (error(Unnameable), "Unnameable"),
    "a zero byte": (error(ValueError, "before\0after"), "after"),
    "not even an Exception": (error(KeyboardInterrupt, "stop"), "stop"),
    "an end": (error(SystemExit, 3), "SystemExit"),
    "long": (error(ValueError, "x" * 10**6 + "end"), "end"),
    "a group": (error(ExceptionGroup, "both", [ValueError("one"), KeyError("\ud800")]), "one"),
}


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_any_exception_comes_back_with_its_cause(name, jit):
    fn, words = ERRORS[name]
    call = torch_call(fn, OUT)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=words):
            jax.block_until_ready((jax.jit(call) if jit else call)(jnp.zeros(3)))
    assert torch_call(adding(1), OUT)(jnp.zeros(3)).tolist() == [1, 1, 1]


@dataclasses.dataclass(frozen=True)
class HoldsAList:
    numbers: list

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    "bad", [3, None, "text", type("F", (list,), {"__call__": len})(), HoldsAList([1])]
)
def test_what_is_no_function_is_refused(bad):
    with pytest.raises(InvalidInputError, match="function"):
        torch_call(bad, OUT)


# What another thread is doing when the main one ends: one call a program, all in one program,
# or a program that XLA runs by itself.
WORK = {
    "programs": """
        run = jax.jit(torch_call(fn, OUT))
        def work():
            y = x
            while True:
                y = run(y)
        """,
    "one program": """
        one = torch_call(fn, OUT)
        run = jax.jit(lambda x: jax.lax.fori_loop(0, 10**9, lambda _, y: one(y), x))
        def work():
            run(x)
        """,
    "not yet begun": """
        one = torch_call(fn, OUT)
        slow = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y @ y * 1e-3, x))
        run = jax.jit(lambda a, x: one(x + a[0, :3] * 0))
        def work():
            global pending
            pending = run(slow(jnp.ones((1000, 1000))), x)
            started.set()
        """,
}


@pytest.mark.parametrize("seconds", [0, 0.2])
@pytest.mark.parametrize("work", WORK)
def test_the_process_may_end_during_a_call(work, seconds):
    """An interpreter that ends kills threads that come back to it, and XLA then aborts."""
    fn = f"""
        started = threading.Event()
        def fn(y):
            started.set()
            time.sleep({seconds})
            return y + 1
        """
    end = """
        threading.Thread(target=work, daemon=True).start()
        started.wait()
        time.sleep(0.05)
        """
    done = alone("".join(map(textwrap.dedent, (fn, WORK[work], end))))
    assert_done(done)
    assert not done.stderr


def test_calls_of_the_main_thread_go_on_at_the_end():
    """What was registered with atexit before the library runs after the library's own."""
    before = "import atexit; atexit.register(lambda: print(call(x).tolist()))\n"
    code = before + program("call = torch_call(lambda y: y + 1, OUT)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert_done(done)
    assert done.stdout == "[1.0, 1.0, 1.0]\n"
