"""Arrays that lie on several devices: taken, or refused by the library."""

import contextlib

import jax
import pytest
from some_devices import mesh_over

from pagedattn import InvalidInputError, PagedAttentionError, write_kv

CALLS = pytest.importorskip("public_calls").CORE


def placed(tree, device):
    """The tree with its arrays, NumPy's too, on a device that somebody chose."""
    return jax.tree.map(lambda x: jax.device_put(x, device) if hasattr(x, "ndim") else x, tree)


def placeable(arguments):
    return [name for name, value in arguments.items() if _arrays(value)]


def _arrays(tree):
    return [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "ndim")]


@pytest.mark.parametrize("name", CALLS)
def test_one_argument_elsewhere(name):
    first, second = mesh_over(2, "x").devices
    function, arguments = CALLS[name]()
    here = placed(arguments, first)
    for elsewhere in placeable(arguments):
        with contextlib.suppress(PagedAttentionError):
            function(**here | {elsewhere: placed(arguments[elsewhere], second)})


@pytest.mark.parametrize("name", CALLS)
def test_all_arguments_elsewhere(name):
    _, second = mesh_over(2, "x").devices
    function, arguments = CALLS[name]()
    if placeable(arguments):
        for leaf in _arrays(function(**placed(arguments, second))):
            # JAX moves constants of its own, which are not committed.
            assert (
                not isinstance(leaf, jax.Array) or leaf.devices() == {second} or not leaf.committed
            )


def test_the_error_names_both():
    first, second = mesh_over(2, "x").devices
    _, arguments = CALLS["write_kv"]()
    with pytest.raises(InvalidInputError, match=r"value must.*cache lies, on \w+:0, got \w+:1"):
        write_kv(**placed(arguments, first) | {"value": placed(arguments["value"], second)})
