"""`cascade_attention` by the oracle, which knows nothing of shared blocks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import SPECS, may_refuse

from pagedattn import (
    AttentionSpec,
    InvalidInputError,
    UnsupportedError,
    cascade_attention,
    make_batch,
    split_prefix,
)
from pagedattn.testing import assert_attention_close, batch_of, cache_of, random_problem

SHARED = 3  # blocks of 4
# Nearly all have these shapes, and so one program.
SIZES = {"num_blocks": 64, "pad_tokens": 13, "max_query_len": 8}
NUM_SEQS, MAX_BLOCKS = 4, 10
BATCHES = {
    "decode": ([1, 1, 1, 1], [13, 17, 30, 24]),
    "decode at the prefix's end": ([1, 1], [13, 13]),
    "chunks": ([4, 1, 0, 6], [16, 13, 3, 40]),
    "one sequence has less": ([1, 1], [9, 30]),
    "no context": ([5, 1], [5, 14]),
    "nobody brings tokens": ([0, 0], [13, 14]),
}
OPTIONS = {
    "plain": {},
    "soft cap": {"spec": SPECS["logits_soft_cap"]},
    "causal=False": {"spec": SPECS["causal=False"]},
    "sinks": {"sinks": True},
    "int8": {"cache_dtype": "int8"},
    "bfloat16": {"dtype": jnp.bfloat16},
}


@pytest.fixture
def backend(backend):
    """Those that give the lse by which parts are merged."""
    if may_refuse(backend, "return_lse"):
        pytest.skip(f"{backend} gives no lse")
    return backend


def shared(query_lens, seq_lens, shared_blocks=SHARED, num_seqs=NUM_SEQS, **options):
    """A problem whose sequences begin with the same blocks; what none of them sees is NaN."""
    spec = options.pop("spec", AttentionSpec())
    sinks = np.float32([0.5, -1, 2, -np.inf]) if options.pop("sinks", False) else None
    padding = [0] * (num_seqs - len(seq_lens))
    lens = [*query_lens, *padding], [*seq_lens, *padding]
    problem = random_problem(*lens, spec, poison=None, **SIZES | options)
    problem = problem.replace(sinks=sinks)
    prefix = max(problem.block_tables, key=len)[:shared_blocks]
    tables = [[*prefix[: len(row)], *row[shared_blocks:]] for row in problem.block_tables]
    tables = [[*row, *[-1] * (MAX_BLOCKS - len(row))] for row in tables]
    return problem.replace(block_tables=tables).poisoned()


def cascade(query, cache, batch, sinks, *, spec, backend):
    parts = split_prefix(batch)
    return cascade_attention(query, cache, *parts, spec, backend=backend, sinks=sinks)


cascade_in_jit = jax.jit(cascade, static_argnames=("spec", "backend"))


def attend(problem, backend, mode):
    call = cascade_in_jit if mode == "jit" else cascade
    sinks = None if problem.sinks is None else jnp.asarray(problem.sinks)
    arrays = jnp.asarray(problem.query), cache_of(problem), batch_of(problem), sinks
    return call(*arrays, spec=problem.spec, backend=backend)


@pytest.mark.parametrize(("name", "mode"), [*((n, "jit") for n in BATCHES), ("chunks", "eager")])
def test_batches(backend, mode, name):
    problem = shared(*BATCHES[name])
    assert_attention_close(*attend(problem, backend, mode), problem, name=backend)


def test_one_sequence(backend):
    problem = shared([3], [20], num_seqs=1)
    assert_attention_close(*attend(problem, backend, "jit"), problem, name=backend)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(backend, name):
    option = {"int8": "cache_dtype", "sinks": "sinks"}.get(name, name)
    if may_refuse(backend, option):
        pytest.skip(f"{backend} may refuse {option}")
    problem = shared(*BATCHES["chunks"], **OPTIONS[name])
    assert_attention_close(*attend(problem, backend, "jit"), problem, name=backend)


def test_one_trace_for_any_number_of_shared_blocks():
    traces = []

    @jax.jit
    def call(query, cache, batch):
        traces.append(1)
        return cascade_attention(query, cache, *split_prefix(batch), backend="xla")

    for count in range(SHARED + 1):
        changed = shared(*BATCHES["decode"], shared_blocks=count)
        arrays = jnp.asarray(changed.query), cache_of(changed), batch_of(changed)
        assert split_prefix(arrays[2])[0].seq_lens.tolist() == [4 * count]
        assert_attention_close(*call(*arrays), changed)
    assert len(traces) == 1


def test_what_is_shared():
    """Whole blocks, before every new token, from the first on, of those that bring tokens."""

    def blocks(tables, contexts, queries=(1, 1)):
        batch = make_batch(queries, contexts, tables, block_size=4)
        prefix, rest = split_prefix(batch)
        first = prefix.block_tables[0, : prefix.seq_lens[0] // 4]
        return first.tolist(), rest.seq_lens.tolist()

    assert blocks([[5, 6, 1], [5, 6, 2]], [9, 8]) == ([5, 6], [2, 1])
    assert blocks([[5, 6, 1], [5, 6, 2]], [9, 7]) == ([5], [6, 4])
    assert blocks([[5, 6, 1], [4, 6, 2]], [9, 9]) == ([], [10, 10])
    assert blocks([[5, 6, 1], [5, 3, 2]], [9, 9]) == ([5], [6, 6])
    assert blocks([[5, 6, 1], [9, 9, 9]], [9, 9], (1, 0)) == ([5, 6], [2, 1])


def test_no_sequences_and_no_blocks():
    batch = make_batch([], [], [], block_size=4, pad_tokens=2)
    cache = cache_of(shared(*BATCHES["decode"]))
    out, lse = cascade_attention(jnp.ones((2, 4, 16)), cache, *split_prefix(batch))
    assert not out.any()
    assert jnp.isneginf(lse).all()


@pytest.mark.parametrize("name", ["sliding_window", "alibi_slopes"])
def test_views_that_differ_are_refused_by_name(name):
    problem = shared(*BATCHES["decode"])
    spec = dataclasses.replace(problem.spec, **{name: getattr(SPECS[name], name)})
    with pytest.raises(UnsupportedError, match=name):
        attend(problem.replace(spec=spec), None, "eager")


def test_not_a_batch():
    with pytest.raises(InvalidInputError, match="BatchMetadata"):
        split_prefix(3)
