"""The mesh axes over which an array varies inside `jax.shard_map`, a part of its type in JAX.

Results of foreign kernels lack them, so they are marked anew; and all branches of a cond, like the
carry of a scan before and after a step, must have the same. With `check_vma=False` there are none.
"""

import jax
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun


def axes_of(arrays) -> frozenset:
    """The axes that any of the arrays varies over; empty outside of shard_map."""
    return frozenset().union(
        *(_axes(leaf) for leaf in jax.tree.leaves(arrays) if isinstance(leaf, Tracer))
    )


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


def traced_apart(kernel, *arrays):
    """`kernel(*arrays)` for a kernel in Pallas: not batched, nor of arrays that vary over an axis.

    JAX batches a kernel by one more axis of its grid, whose programs would then share semaphores;
    it cannot where the kernel writes in place: `jax.vmap` loops instead. And a kernel of Mosaic
    keeps the axes that its arguments vary over, for which JAX refuses its warps: "mpmd_map does not
    support Refs with varying manual axis types" (0.11, 0.12). Nothing but the kernel may be in it:
    other operations of JAX ask that what they combine varies alike.
    """

    @jax.custom_batching.sequential_vmap
    def apart(*arrays):
        plain = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), arrays)
        closed, outs = jax.make_jaxpr(kernel, return_shape=True)(*plain)
        results = jaxpr_as_fun(closed)(*arrays)
        return varying(jax.tree.unflatten(jax.tree.structure(outs), results), axes_of(arrays))

    return apart(*arrays)


def _axes(array) -> frozenset:
    return jax.typeof(array).manual_axis_type.varying
