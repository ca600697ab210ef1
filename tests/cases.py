"""How the tests call the library: one problem in, numpy out."""

import dataclasses
from typing import Any, NoReturn

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pagedattn import AttentionSpec, KVCache, UnsupportedError, explain, paged_attention
from pagedattn._dispatch.call import KEYWORDS
from pagedattn._dispatch.registry import Framework, can_load, load
from pagedattn.testing import Problem, batch_of, cache_of, random_problem
from pagedattn.testing.features import OPTIONS, signed_slopes, spec_of
from pagedattn.testing.running import attend_with_lse
from pagedattn.testing.strategies import BUCKETS, options_table, problems

# Those that support every spec, and those that do not. Others have test files of their own.
EVERY_SPEC = {"cpu": ("xla", "sdpa", "numba"), "gpu": ("xla", "sdpa", "triton")}
SOME_SPECS = {"cpu": ("ipex",), "gpu": ()}
BACKENDS = [n for n in EVERY_SPEC[jax.default_backend()] if can_load(n)]
PARTIAL = [n for n in SOME_SPECS[jax.default_backend()] if can_load(n)]
MODES = ("eager", "jit")

# The options that a backend may refuse; any other must support every one.
REFUSING = {
    "ipex": (
        *("alibi_slopes", "bias", "cache_dtype", "parents", "return_lse", "selection", "sinks"),
        *("sliding_window", "value_dim"),
    ),
    "sdpa": ("selection",),
    "triton": ("bias",),
}
if can_load("sdpa"):
    from pagedattn_interop.backends import takes

    if not takes("float8_e5m2"):
        REFUSING["sdpa"] += ("cache_dtype",)

SIGNED = signed_slopes(4)  # ALiBi slopes of four heads
ONE_BY_ONE = ("plain", "scale", "sliding_window", "logits_soft_cap", "alibi_slopes", "causal=False")
SPECS = {name: spec_of(name, 4) for name in (*ONE_BY_ONE, "all")}


class Calls:
    """What became of the calls of one test by a backend that may refuse them."""

    def __init__(self):
        self.clear()

    def clear(self) -> None:
        self.ran, self.refused = 0, []

    def refuse(self, error: UnsupportedError, asked: list[str], backend: str) -> NoReturn:
        """Ends a test, or rejects an example, that a backend refused.

        The refusal must name something that is asked for and may be refused.
        """
        assert any(name in str(error) for name in asked if name in REFUSING[backend]), str(error)
        self.refused.append(str(error))
        if hypothesis.currently_in_test_context():
            hypothesis.reject()
        pytest.skip(str(error))


calls = Calls()


def may_refuse(backend: str | None, option: str) -> bool:
    return option in REFUSING.get(backend, ())


def run(problem: Problem, backend: str | None, mode: str = "jit") -> tuple[Any, Any]:
    """out and lse of a problem as float arrays of numpy; mode is "eager" or "jit".

    lse is None where the backend gives none. Where it refuses the call the test ends: nothing else
    stands for its results.
    """
    try:
        out, lse = attend_with_lse(problem, backend, mode == "jit")
    except UnsupportedError as error:
        if backend not in REFUSING:
            raise
        calls.refuse(error, asked_of(problem.spec) + beside(problem), backend)
    assert lse is not None or may_refuse(backend, "return_lse"), f"{backend} gives no lse"
    calls.ran += backend in REFUSING
    return np.asarray(out), None if lse is None else np.asarray(lse)


def rows_of(results: tuple[Any, Any], rows: Any) -> list[Any]:
    """Some rows of out and lse."""
    return [None if array is None else array[rows] for array in results]


def lacks(backend: str, name: str, framework: Framework = Framework.JAX) -> list[str]:
    """The options of a name in `features.OPTIONS` that a backend knows nothing of."""
    record, known = load(backend, framework), {*KEYWORDS, *AttentionSpec.__annotations__}
    return [option for option in OPTIONS.get(name, ()) if option in known and record.lacks(option)]


def problems_for(backend: str, strategy=problems, bucket=None, **kwargs: Any):
    """Problems with options that a backend knows: to refuse most examples would be no test."""

    def of_bucket(bucket):
        table = options_table(bucket.num_heads)
        known = [options for name, options in table.items() if not lacks(backend, name)]
        return st.sampled_from(known).flatmap(
            lambda options: strategy(bucket=bucket, **options._asdict(), **kwargs)
        )

    return of_bucket(bucket) if bucket else st.sampled_from(BUCKETS).flatmap(of_bucket)


def asked_of(spec: AttentionSpec) -> list[str]:
    """The fields of a spec that are set."""
    return [f.name for f in dataclasses.fields(spec) if getattr(spec, f.name) != f.default]


def beside(problem: Problem) -> list[str]:
    """What a problem asks for beside its spec."""
    quantised = problem.key_scale is not None
    drafts = ["parents"] * (problem.parents is not None)
    other_values = problem.value_cache is None or problem.out_shape != problem.query.shape
    return [*problem.arrays, *["cache_dtype"] * quantised, *["value_dim"] * other_values, *drafts]


def supported(problem: Problem, backend: str) -> Problem:
    """The problem without the fields of its spec that the backend refuses."""
    query = jnp.asarray(problem.query)
    reasons = " ".join(explain(query, cache_of(problem), batch_of(problem), problem.spec)[backend])
    fields = dataclasses.fields(problem.spec)
    return replace_spec(problem, **{f.name: f.default for f in fields if f.name in reasons})


def attend_with_any_lse(query, cache, batch, spec, backend: str):
    """`paged_attention` with lse, inside jit too; None where the backend gives none."""
    if may_refuse(backend, "return_lse"):
        return paged_attention(query, cache, batch, spec, backend=backend), None
    return paged_attention(query, cache, batch, spec, backend=backend, return_lse=True)


def mixed(spec: AttentionSpec = SPECS["plain"], **kwargs: Any) -> Problem:
    """Prefill, chunk, decode, an empty query and a padding sequence in one batch, two pad rows."""
    kwargs = {"pad_tokens": 20, "max_query_len": 16} | kwargs
    return random_problem([6, 7, 1, 0, 4, 0], [6, 19, 22, 9, 5, 0], spec, **kwargs)


def own_indices(problem: Problem) -> np.ndarray:
    """Of each token that is not padding, its index among its sequence's new ones."""
    return np.concatenate([*map(np.arange, problem.query_lens), np.zeros(0, int)])


def padded(problem: Problem, parents: np.ndarray) -> np.ndarray:
    """Parents, with -1 for the padding."""
    return np.append(parents, np.full(len(problem.query) - len(parents), -1))


def grown(problem: Problem, seed: int, branching: float | np.ndarray = 0.5) -> Problem:
    """The problem with random parents: a share of its tokens follow another than the last one.

    Of all tokens the same share, or of each its own.
    """
    own, rng = own_indices(problem), np.random.default_rng(seed)
    others = rng.integers(-1, np.maximum(own, 0))
    parents = np.where(rng.random(len(own)) < branching, others, own - 1)
    return problem.replace(parents=padded(problem, parents))


def replace_spec(problem: Problem, **fields: Any) -> Problem:
    """The problem with some fields of its spec changed."""
    return problem.replace(spec=dataclasses.replace(problem.spec, **fields))


def random_cache(num_blocks=9, block_size=4, num_kv_heads=2, head_dim=8, dtype=np.float32, seed=0):
    """A cache of unit normal values."""
    rng = np.random.default_rng(seed)
    shape = num_blocks, block_size, num_kv_heads, head_dim
    return KVCache(*(jnp.asarray(rng.standard_normal(shape).astype(dtype)) for _ in range(2)))


def rows(num_tokens: int, cache: KVCache, seed: int = 1) -> tuple[jax.Array, jax.Array]:
    """New keys and values for a cache."""
    rng = np.random.default_rng(seed)
    shape = num_tokens, cache.num_kv_heads, cache.head_dim
    key, value = (jnp.asarray(rng.standard_normal(shape), cache.dtype) for _ in range(2))
    return key, value


def as_numpy(cache: Any) -> tuple[np.ndarray, np.ndarray]:
    """Copies of both halves of a cache, of JAX arrays or of torch tensors."""
    halves = (half.cpu() if hasattr(half, "cpu") else half for half in (cache.key, cache.value))
    key, value = (np.asarray(half).copy() for half in halves)
    return key, value


def good_call():
    """query, cache, batch, spec of a mixed problem: 6 sequences, 6 table columns, 20 tokens."""
    problem = mixed()
    return jnp.asarray(problem.query), cache_of(problem), batch_of(problem), problem.spec


def assert_same(got: Any, want: Any) -> None:
    """Two pytrees of one structure and of equal arrays."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(*pair)


def assert_close(got: Any, want: Any) -> None:
    """Two pytrees of one structure, as results without lse have another than those with it."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for pair in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-5, atol=1e-6)


def assert_words(error, words):
    missing = [word for word in words if word not in str(error.value)]
    assert not missing, str(error.value)
