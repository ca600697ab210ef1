"""Less work for Numba's compiler, for which a first call waits."""

import contextlib
import copy
import gc
from collections import defaultdict
from typing import Any

from numba.core import ir

SCOPE: Any = ir.Scope


@contextlib.contextmanager
def compiling_faster():
    with _no_collections(), _shared_variables():
        yield


@contextlib.contextmanager
def _no_collections():
    """Numba makes millions of objects: looking for cycles among them takes a sixth of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _shared_variables():
    """Of a text that is put elsewhere, each block gets a shallow copy of the function's scope.

    Numba 0.61 to 0.68 copies all variables with it, in a third of the time, and changes only maps.
    """
    if "__deepcopy__" in vars(SCOPE):  # of another version
        yield
        return
    SCOPE.__deepcopy__ = _copied
    try:
        yield
    finally:
        del SCOPE.__deepcopy__


def _copied(scope, memo):
    copied = memo[id(scope)] = copy.copy(scope)
    known = {"parent", "localvars", "loc", "redefined", "var_redefinitions"}
    if vars(scope).keys() != known:  # of another version
        vars(copied).update(copy.deepcopy(vars(scope), memo))
        return copied
    copied.localvars = copy.copy(scope.localvars)
    copied.localvars._con = dict(scope.localvars._con)
    copied.redefined = copy.copy(scope.redefined)
    sets = {name: set(names) for name, names in scope.var_redefinitions.items()}
    copied.var_redefinitions = defaultdict(set, sets)
    return copied
