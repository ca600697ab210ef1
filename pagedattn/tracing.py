"""The mesh axes over which an array varies inside `jax.shard_map`, a part of its type in JAX.

Results of foreign kernels lack them, so they are marked anew; and all branches of a cond, like the
carry of a scan before and after a step, must have the same. With `check_vma=False` there are none.
"""

import jax

from .checks import is_traced


def axes_of(arrays) -> frozenset:
    """The axes that any of the arrays varies over; empty outside of shard_map."""
    return frozenset().union(*(_axes(leaf) for leaf in jax.tree.leaves(arrays) if is_traced(leaf)))


def varying_alike(arrays):
    """The same arrays, all marked as varying over the axes that any of them varies over."""
    return varying(arrays, axes_of(arrays))


def varying(arrays, axes: frozenset):
    """The same arrays, marked as varying over the axes; gradients are summed over those added."""
    if not axes:
        return arrays

    def mark(array):
        return jax.lax.pcast(array, tuple(axes - _axes(array)), to="varying")

    return jax.tree.map(mark, arrays)


def _axes(array) -> frozenset:
    return jax.typeof(array).manual_axis_type.varying
