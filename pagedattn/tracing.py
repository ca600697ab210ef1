"""Over which axes of a mesh arrays vary inside `jax.shard_map`: JAX checks it unless told not to.

Calls of foreign kernels lose it, and branches of a cond and carries of a scan must agree in it.
"""

import jax

from .checks import is_traced


def axes_of(arrays) -> frozenset:
    """The axes that any array varies over: none outside of shard_map, or with check_vma=False."""
    return frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(arrays) if is_traced(leaf)))


def varying_alike(arrays):
    """The same arrays, all marked as varying over the axes that any of them varies over."""
    return varying(arrays, axes_of(arrays))


def varying(arrays, axes: frozenset):
    """The same arrays, marked as varying over the axes; a gradient is summed over those added."""
    if not axes:
        return arrays

    def mark(array):
        return jax.lax.pcast(array, tuple(axes - _axes(array)), to="varying")

    return jax.tree.map(mark, arrays)


def _axes(array) -> frozenset:
    return jax.typeof(array).manual_axis_type.varying
