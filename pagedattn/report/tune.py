"""The crossings of this machine: at which sizes another backend becomes faster, by measurement."""

import bisect
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._arrays.namespace import cdiv
from .._dispatch.crossings import NEVER, Crossings
from ..attention import explain, paged_attention
from ..batch.make_batch import make_batch
from ..batch.metadata import BatchMetadata
from ..cache.kv_cache import KVCache
from ..spec import AttentionSpec

SECONDS = 110  # for all of it; what does not fit keeps its figure
LAYERS = 4  # calls in a program
RUNS = 5  # of which the median counts
ENOUGH, MOST_TIMES = 0.02, 50  # seconds of a run, and most programs in it
BLOCK_SIZE = 16


class Work(NamedTuple):
    """The sizes of a call, in bfloat16."""

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None  # of latents

    @property
    def num_keys(self) -> int:
        """Room of a row of the tables."""
        return cdiv(max(self.seq_lens), BLOCK_SIZE) * BLOCK_SIZE


class Crossing(NamedTuple):
    """A field of `Crossings`, and how it is measured.

    Fields:
      field: its name.
      taken, instead_of: the backend that is ahead from the crossing on, and the one before it.
      sizes: what is tried, ascending.
      work: the call of a size.
      figure: what the field is where the crossing is at a size.
      unless: a backend that is taken for such calls at any size, where it is usable.
    """

    field: str
    taken: str
    instead_of: str
    sizes: tuple[int, ...]
    work: Callable[[int], Work]
    figure: Callable[[int, Work], int] = lambda size, work: size
    unless: str | None = None


def _chunks(num_seqs: int, context: int, **sizes: int) -> Callable[[int], Work]:
    """Sequences of so many queries each, on a context."""
    return lambda n: Work((n,) * num_seqs, (context + n,) * num_seqs, **sizes)


def _uneven_decodes(num_seqs: int) -> Work:
    lens = np.linspace(512, 4096, num_seqs).astype(int)
    return Work((1,) * num_seqs, tuple(lens.tolist()))


def _latents(num_seqs: int) -> Work:
    sizes = {"num_heads": 128, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512}
    return Work((1,) * num_seqs, (2048,) * num_seqs, **sizes)


def _products(_size: int, work: Work) -> int:
    return sum(work.query_lens) * work.num_heads * work.num_keys


CROSSINGS = (
    Crossing("mosaic_query_len", "mosaic", "triton", (16, 32, 64, 128, 256, 512), _chunks(8, 1024)),
    Crossing("cudnn_query_len", "cudnn", "triton", (2048, 4096, 8192), _chunks(2, 0, head_dim=64)),
    Crossing("latent_work", "mosaic", "triton", (4, 8, 16, 32, 64), _latents, _products),
    Crossing(
        "mosaic_fewest_decodes",
        "mosaic",
        "triton",
        (8, 16, 24, 32, 48, 64),
        _uneven_decodes,
        lambda size, work: size * work.num_kv_heads,
    ),
    Crossing(
        "mosaic_most_decodes",
        "triton",
        "mosaic",
        (64, 83, 96, 128, 192),
        _uneven_decodes,
        lambda size, work: size * work.num_kv_heads - 1,
    ),
    Crossing("mosaic_many_query_len", "mosaic", "triton", (2, 4, 8, 16, 32), _chunks(64, 4096)),
    Crossing(
        "sdpa_work",
        "sdpa",
        "xla",
        (64, 256, 1024, 4096, 16384),
        lambda n: Work((64,), (n,), num_heads=8, num_kv_heads=8, head_dim=64),
        lambda _size, work: _products(0, work) * work.head_dim,
        unless="numba",
    ),
)


class Row(NamedTuple):
    """One crossing as measured.

    Fields:
      figure: of the field; None where the time was over before it was found.
      microseconds: of each size that was tried, by the two backends.
    """

    field: str
    taken: str
    instead_of: str
    figure: int | None
    microseconds: dict[int, tuple[float, float]]


Measure = Callable[[str, Work], float]  # seconds of a call by a backend
Usable = Callable[[Work], set[str]]  # the backends that can run a call


def tune(
    measure: Measure | None = None,
    usable: Usable | None = None,
    seconds: float = SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """The rows of all crossings whose backends are usable here, and the record that they give."""
    measure, usable = measure or seconds_of, usable or usable_for
    end = clock() + seconds
    rows = []
    for crossing in CROSSINGS:
        able = usable(crossing.work(crossing.sizes[0]))
        if {crossing.taken, crossing.instead_of} <= able and crossing.unless not in able:
            rows.append(_row(crossing, measure, lambda: clock() > end))
    found = {row.field: row.figure for row in rows if row.figure is not None}
    crossings = replace(Crossings(), **found)
    return {
        "device": jax.devices()[0].device_kind,
        "rows": [row._asdict() for row in rows],
        "crossings": {field.name: getattr(crossings, field.name) for field in fields(crossings)},
        "record": repr(crossings),
    }


def _row(crossing: Crossing, measure: Measure, is_over: Callable[[], bool]) -> Row:
    """The least size from which the backend that is taken is the faster one: by halving."""
    taken: dict[int, tuple[float, float]] = {}

    def ahead(size: int) -> bool:
        if is_over():
            raise TimeoutError
        work = crossing.work(size)
        ours, other = (1e6 * measure(name, work) for name in (crossing.taken, crossing.instead_of))
        taken[size] = round(ours, 1), round(other, 1)
        return ours < other

    try:
        index = bisect.bisect_left(crossing.sizes, True, key=ahead)
    except TimeoutError:
        figure = None
    else:
        size = crossing.sizes[index] if index < len(crossing.sizes) else None
        figure = NEVER if size is None else crossing.figure(size, crossing.work(size))
    return Row(crossing.field, crossing.taken, crossing.instead_of, figure, taken)


def usable_for(work: Work) -> set[str]:
    """The backends that can run a call on this machine; its arrays are not made."""
    reasons: dict[str, list[str]] = {}
    jax.eval_shape(lambda: reasons.update(explain(*_arrays(work))))
    return {name for name, why in reasons.items() if not why}


def seconds_of(backend: str, work: Work) -> float:
    """Seconds of a call among others in one program, where no host is waited for."""
    arrays = _arrays(work)

    def run(times: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready([_layers(*arrays, backend=backend) for _ in range(times)])
        return (time.perf_counter() - start) / (times * LAYERS)

    run(1)
    times = max(1, min(MOST_TIMES, int(ENOUGH / (LAYERS * run(1)))))
    return statistics.median(run(times) for _ in range(RUNS))


@functools.partial(jax.jit, static_argnames=("spec", "backend"))
def _layers(query, cache, batch, spec, backend):
    """Calls of which each waits for the one before, with nothing that two could share."""
    for _ in range(LAYERS):
        query, cache = jax.lax.optimization_barrier((query, cache))
        out = paged_attention(query, cache, batch, spec, backend=backend)
        query = jnp.concatenate([out, query[..., out.shape[-1] :]], axis=-1)
    return query


def _arrays(work: Work) -> tuple[jax.Array, KVCache, BatchMetadata, AttentionSpec]:
    """query, cache, batch and spec of a call, its blocks scattered."""
    counts = [cdiv(n, BLOCK_SIZE) for n in work.seq_lens]
    ids = np.random.default_rng(0).permutation(sum(counts))
    tables = [row.tolist() for row in np.split(ids, np.cumsum(counts)[:-1])]
    lens = {"key_lens": work.seq_lens, "block_size": BLOCK_SIZE}
    batch = make_batch(work.query_lens, None, tables, **lens)
    plane = sum(counts), BLOCK_SIZE, work.num_kv_heads, work.head_dim
    shapes = (sum(work.query_lens), work.num_heads, work.head_dim), plane, plane
    keys = jax.random.split(jax.random.key(0), len(shapes))
    query, key, value = map(_normal, keys, shapes)
    cache = KVCache(key, None if work.value_dim else value, value_dim=work.value_dim)
    return query, cache, batch, AttentionSpec()


def _normal(key, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(key, shape, jnp.bfloat16)
