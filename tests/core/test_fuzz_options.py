"""The fuzzer over calls with every option and over what crosses frameworks; and that none lacks.

The short form, as test_fuzz; `make test-deep` runs the long one.
"""

import inspect
import itertools

import option_calls
import pagedattn_interop as pi
import public_calls
import pytest
from fuzzing import fuzz

import pagedattn as pa
import pagedattn_torch as pt

COUNTS = {"OPTIONS": 150, "SELECTION": 150, "TREES": 160}
COUNTS |= {"STEPS": 200, "CROSSING": 200, "LAYERS": 260}
WRAPPED = {public_calls.across: pa.merge_across, option_calls.called: pi.torch_call}
NOT_CALLED = {pa.available_backends}  # has no arguments


def needs_numba():
    """Torch's steps over chosen blocks on a CPU are numba's."""
    pytest.importorskip("numba")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("family", COUNTS)
def test_hostile_options_end_in_errors_of_ours(family):
    if family == "SELECTION":
        needs_numba()
    failures = fuzz(option_calls.FAMILIES[family], range(COUNTS[family]))
    assert not failures, "\n".join(map(str, failures))


@pytest.mark.usefixtures("on_cpu")
def test_every_argument_of_every_public_function_is_fuzzed():
    needs_numba()
    fuzzed = {}
    for make in itertools.chain(*(family.values() for family in option_calls.FAMILIES.values())):
        function, arguments = make()
        names = fuzzed.setdefault(WRAPPED.get(function, function), set())
        names |= {"axis_name" if name == "axis" else name for name in arguments}
    named = {getattr(module, name) for module in (pa, pt, pi) for name in module.__all__[:]}
    functions = {found for found in named if inspect.isfunction(found)} - NOT_CALLED
    lacking = {
        function.__name__: {*inspect.signature(function).parameters} - fuzzed.get(function, set())
        for function in functions
    }
    assert not {name: names for name, names in lacking.items() if names}
