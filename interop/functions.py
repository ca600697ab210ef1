"""The functions that programs of XLA may call, by name, each for as long as one may."""

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pagedattn import InvalidInputError


class Function(str):
    """The name of a torch function, which holds it.

    A parameter of the call in JAX's programs: what holds the program holds the function. XLA sees
    the name alone. A string of up to seven characters is the one attribute that reaches a callback
    by value; a number would leave 16 bytes behind at every call.
    """

    fn: Callable
    num_outs: int
    in_place: bool
    pools: dict | None  # device -> the memory of captured calls, which replays go on writing to


_names = map("{:x}".format, itertools.count())
_by_name: dict[str, weakref.ref[Function]] = {}  # quicker than a WeakValueDictionary
_by_meaning: weakref.WeakValueDictionary[tuple, Function] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def function_of(fn, num_outs: int, in_place: bool, capturable: bool) -> Function:
    """The one Function of equal functions and settings, as long as anybody holds it."""
    if not callable(fn) or not isinstance(fn, Hashable):
        raise InvalidInputError(f"torch_call expects a function that can be hashed, got {fn!r}")
    meaning = (fn, num_outs, in_place, capturable)
    with _lock:
        return _by_meaning.get(meaning) or _by_meaning.setdefault(meaning, _new(*meaning))


def _new(fn, num_outs, in_place, capturable):
    name = next(_names)
    function = Function(name)
    function.fn, function.num_outs, function.in_place = fn, num_outs, in_place
    function.pools = {} if capturable else None
    _by_name[name] = weakref.ref(function, lambda _: _by_name.pop(name))
    return function


def named(name: str) -> Function:
    function = _by_name[name]() if name in _by_name else None
    if function is None:
        raise LookupError(
            "this program's torch function is gone: JAX's caches were cleared, and nothing else "
            "held the function"
        )
    return function


def hold(results, function: Function):
    """The results, of a program that holds the function for as long as it can run itself."""
    return _hold.bind(*results, function=function)


def _lower(context, *results, function):
    context.module_context.add_keepalive(function)
    return results


def _batch(results, dims, *, function):
    return _hold.bind(*results, function=function), dims


_hold = Primitive("torch_call_hold")
_hold.multiple_results = True
_hold.def_impl(lambda *results, function: list(results))
_hold.def_abstract_eval(lambda *results, function: list(results))
mlir.register_lowering(_hold, _lower)
batching.primitive_batchers[_hold] = _batch
