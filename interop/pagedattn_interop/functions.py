"""The functions that XLA's programs call by name, each kept as long as a program may call it."""

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import NamedTuple

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pagedattn import InvalidInputError
from pagedattn.facts import shown


class Form(NamedTuple):
    """How a torch function is called.

    Fields:
      num_outs: how many results it has.
      takes_out: whether it is given their memory, as the keyword `out`.
      single: whether that is a tensor, rather than a tuple of them.
      writes: whether it may have written all results itself, and return None.
      capturable: whether XLA may capture what it launches.
    """

    num_outs: int
    takes_out: bool
    single: bool
    writes: bool
    capturable: bool


class Function(str):
    """The name of a torch function: a string that also keeps the function alive.

    It is a parameter of the call in JAX's programs, so a program keeps its functions alive. XLA
    sees only the string. Strings of up to seven characters are the only attributes that reach a
    callback by value; a number would leak 16 bytes at every call.

    Fields:
      fn, form: the function, and how it is called.
      pools: by device, the memory that captured calls allocate from; None if not capturable.
    """

    fn: Callable
    form: Form
    pools: dict | None


_names = map("{:x}".format, itertools.count())
_by_name: dict[str, weakref.ref[Function]] = {}  # quicker than a WeakValueDictionary
_by_meaning: weakref.WeakValueDictionary[tuple, Function] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def function_of(fn, form: Form) -> Function:
    """The Function of a function and its form: the same one for equal ones while it lives."""
    if not callable(fn) or not isinstance(fn, Hashable):
        raise InvalidInputError(
            f"torch_call expects a function that can be hashed, got {shown(fn)}"
        )
    meaning = (fn, form)
    with _lock:
        return _by_meaning.get(meaning) or _by_meaning.setdefault(meaning, _new(*meaning))


def _new(fn, form):
    name = next(_names)
    function = Function(name)
    function.fn, function.form = fn, form
    function.pools = {} if form.capturable else None
    _by_name[name] = weakref.ref(function, lambda _: _by_name.pop(name))
    return function


def named(name: str) -> Function:
    function = _by_name[name]() if name in _by_name else None
    if function is None:
        raise LookupError(
            "this program's torch function is gone: the program was loaded in another process, or "
            "JAX's caches were cleared and nothing else held the function"
        )
    return function


def hold(results, function: Function):
    """The results, unchanged; the program that computes them keeps the function alive."""
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
