"""Numba's compiler, made to do less: what it compiles, and what it leaves, is the same."""

import copy
import gc

import pytest

pytest.importorskip("numba")

import numba
from numba.core import ir

from pagedattn._kernels.cpu.compiling_faster import compiling_faster

HERE = ir.Loc(__file__, 1)


@numba.njit(inline="always")
def add_odd(numbers):
    total = 0
    for number in range(numbers):
        if number % 2:
            total += number
    return total


def twice(numbers):
    """Texts that are put into one function twice, whose variables must not be mixed up."""
    first = add_odd(numbers)
    second = add_odd(numbers + first)
    return first, second


def test_what_is_compiled_is_the_same():
    with compiling_faster():
        assert numba.njit(twice)(9) == (16, 144)
    assert numba.njit(twice)(9) == (16, 144)


def test_a_copied_scope_has_maps_of_its_own():
    scope = ir.Scope(None, HERE)
    variable = scope.define("x", HERE)
    with compiling_faster():
        copied = copy.deepcopy(scope)
    copied.redefine("x", HERE)
    copied.define("y", HERE)
    assert copied.get_exact("x") is variable
    assert [*scope.localvars._con] == ["x"]
    assert (dict(scope.redefined), dict(scope.var_redefinitions)) == ({}, {})


def test_a_scope_of_another_version_is_copied_whole():
    scope = ir.Scope(None, HERE)
    scope.more = ["new"]
    with compiling_faster():
        copied = copy.deepcopy(scope)
    assert copied.more == ["new"]
    assert copied.more is not scope.more


def test_nothing_is_left_behind():
    with compiling_faster():
        assert not gc.isenabled()
    with pytest.raises(RecursionError), compiling_faster():
        raise RecursionError
    assert gc.isenabled()
    assert "__deepcopy__" not in vars(ir.Scope)
