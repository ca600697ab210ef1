"""The functions that XLA's programs call by name, each kept as long as a program may call it.

A program may be saved, and loaded in another process: its names must not be those of other
functions there. So a name is random; or the hash of a text that means the same in every process,
and then JAX's persistent cache of programs has it, too.
"""

import base64
import hashlib
import secrets
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from pagedattn import InvalidInputError
from pagedattn._arrays.inspect import shown


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


@runtime_checkable
class Described(Protocol):
    """A function that knows what to call it in every process, and that owns no memory."""

    def text(self) -> str | None:
        """The text, equal for functions that do the same; None if there is none."""
        ...


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

    def __reduce__(self):
        """Saved with a program, if `fn` can be pickled: the program then runs it where it loads."""
        return _loaded, (str(self), self.fn, self.form)


LONGEST_NAME = 7  # characters
# What lives as long as the process: a program that JAX has just dropped may still be running.
_described: dict[str, tuple[Callable, Form]] = {}
_by_name: dict[str, weakref.ref[Function]] = {}  # quicker than a WeakValueDictionary
_by_meaning: weakref.WeakValueDictionary[tuple, Function] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def function_of(fn, form: Form) -> Function:
    """The Function of a function and its form: the same one for equal ones while it lives."""
    if not callable(fn) or not _has_hash(fn):
        raise InvalidInputError(
            f"torch_call expects a function that can be hashed, got {shown(fn)}"
        )
    meaning = (fn, form)
    with _lock:
        return _by_meaning.get(meaning) or _by_meaning.setdefault(
            meaning, _new(*meaning, _name(*meaning))
        )


def text_of(fn: Any) -> str | None:
    """What a function is called in every process; None if it has no name there.

    >>> text_of(text_of)
    'pagedattn_interop.functions:text_of'
    """
    if isinstance(fn, Described):
        return fn.text()
    if not isinstance(fn, types.FunctionType) or fn.__module__ == "__main__":
        return None
    found = sys.modules.get(fn.__module__)
    for part in fn.__qualname__.split("."):
        found = getattr(found, part, None)
    return f"{fn.__module__}:{fn.__qualname__}" if found is fn else None


def _has_hash(fn) -> bool:
    try:
        hash(fn)
    except Exception:  # a record that holds a list says only now that it has none
        return False
    return True


def _loaded(name, fn, form) -> Function:
    """The function of a program that another process has saved, by the name that it has there."""
    with _lock:
        return _registered(name) or _new(fn, form, name)


def _registered(name) -> Function | None:
    ref = _by_name.get(name)
    return ref() if ref else None


def _new(fn, form, name):
    function = Function(name)
    function.fn, function.form = fn, form
    function.pools = {} if form.capturable else None
    _by_name[name] = weakref.ref(function, lambda ref: _forget(name, ref))
    return function


def _name(fn, form) -> str:
    text = text_of(fn)
    if text is not None:
        digest = hashlib.sha256(f"{text} {form}".encode()).digest()
        name = base64.b85encode(digest)[:LONGEST_NAME].decode()
        if _described.setdefault(name, (fn, form)) == (fn, form):
            return name
    return base64.b85encode(secrets.token_bytes(8))[:LONGEST_NAME].decode()


def _forget(name, ref):
    if _by_name.get(name) is ref:  # and not one that was made anew meanwhile
        del _by_name[name]


def named(name: str) -> Function:
    function = _registered(name)
    if function is None and name in _described:
        function = function_of(*_described[name])
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
