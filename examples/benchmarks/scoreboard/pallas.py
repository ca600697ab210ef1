"""JAX's ragged paged attention for TPUs, interpreted on a CPU."""

from unittest import mock

import numpy as np

from benchmarks.scoreboard.peer import Answer, Peer, lens, planes, scale_of, starts, tables
from pagedattn.testing import Problem

# Of one of its steps, for its own choice asks which TPU there is. The interpreter of JAX 0.10 takes
# no masked stores with more rows than columns of heads.
PAGES, QUERIES = 2, 4


class Pages:
    """A reference to pages by its values: JAX 0.10's interpreter reads no reshaped references."""

    def __init__(self, values):
        self.values, self.dtype, self.shape = values, values.dtype, values.shape

    def reshape(self, *shape):
        return Pages(self.values.reshape(*shape))

    def bitcast(self, dtype):
        """Neighbouring rows as the parts of wider numbers, the first in the lowest bits."""
        import jax

        packing = np.dtype(dtype).itemsize // self.dtype.itemsize
        parts = self.values.reshape(-1, packing, self.shape[-1]).swapaxes(1, 2)
        return Pages(jax.lax.bitcast_convert_type(parts, dtype))

    def __getitem__(self, index):
        return self.values[index]


def _wait(copies):
    for copy in copies._async_copies:
        copy.wait()
    return Pages(copies._vmem_buf[...])


def ragged(problem: Problem) -> Answer:
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

    key, value = planes(problem)
    pages = np.stack([key, value], axis=3).reshape(*key.shape[:2], -1, key.shape[3])
    scales = {"k_scale": problem.key_scale, "v_scale": problem.value_scale}
    operands = problem.query, pages, lens(problem), tables(problem), starts(problem)
    copies = mock.patch.object(kernel.MultiPageAsyncCopyDescriptor, "wait", _wait)
    with tpu.force_tpu_interpret_mode(), copies:
        out = kernel.ragged_paged_attention(
            *map(jnp.asarray, operands),
            jnp.asarray([len(problem.seq_lens)], jnp.int32),
            sm_scale=scale_of(problem),
            sliding_window=problem.spec.sliding_window,
            soft_cap=problem.spec.logits_soft_cap,
            **{name: None if x is None else float(x) for name, x in scales.items()},
            num_kv_pages_per_block=PAGES,
            num_queries_per_block=QUERIES,
        )
    return np.asarray(out.astype(jnp.float32)), None


PALLAS = {
    "JAX ragged (TPU)": Peer(
        ragged,
        frozenset({"scale", "sliding_window", "logits_soft_cap", "cache_dtype", "float32"}),
        modules=("jax.experimental.pallas.ops.tpu.ragged_paged_attention",),
        install="pip install jax",
        packages=("jax", "jaxlib"),
        device="cpu",
        about="`jax.experimental.pallas.ops.tpu.ragged_paged_attention`, by JAX's interpreter for "
        "TPUs on a CPU, which computes what a TPU would, but not with its roundings. That of JAX "
        "0.10 reads no reshaped references, as this kernel's pages are: they are read by value",
    )
}
