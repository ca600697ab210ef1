"""What attention calls differ in: options, phases, types of attention, dtypes.

The only list of them, with example values: the printed table, `check_backend`, the strategies and
the tests use it.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  (teaches NumPy the names of float8)
import numpy as np

from ..cache.packing import name_of, packed
from ..cache.quantise import LARGEST, largest, scale_dtype, scale_shape
from ..selection.selection import Selection
from ..spec import AttentionSpec

DTYPES = ("float32", "bfloat16", "float16")


def signed_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi slopes of both signs, one for each query head.

    >>> signed_slopes(3)
    (0.25, -0.5, 0.75)
    """
    return tuple((-1.0) ** head * 0.25 * (head + 1) for head in range(num_heads))


class Sizes(NamedTuple):
    """The sizes of a call that arrays beside query and cache have axes of."""

    num_tokens: int
    num_heads: int
    max_keys: int
    num_seqs: int
    num_kv_heads: int
    max_blocks: int


class ArrayOption(NamedTuple):
    """An option of a call that is an array: its shape, and what random ones are like.

    `fill(rng, array)` changes an array of unit normal numbers in place. `as_given(array)` is what
    the library takes for it.
    """

    shape: Callable[[Sizes], tuple[int, ...]]
    fill: Callable[[np.random.Generator, np.ndarray], None]
    dtype: str = "float32"
    as_given: Callable[[Any], Any] = lambda array: array


def _none_of_the_last_head(_rng, sinks):
    sinks[1:][-1:] = -np.inf


def _hide_some_keys(rng, bias):
    """It hides a third of the keys, and from a tenth of the rows all."""
    bias[rng.random(bias.shape) < 1 / 3] = -np.inf
    bias[rng.random(bias.shape[:2]) < 1 / 10] = -np.inf


def _any_blocks(rng, blocks):
    """About two thirds of a sequence's, some of them twice, and some that it does not have."""
    blocks[:] = rng.integers(-1, blocks.shape[-1], blocks.shape)


# By the keywords of `paged_attention`.
ARRAYS = {
    "sinks": ArrayOption(lambda sizes: (sizes.num_heads,), _none_of_the_last_head),
    "bias": ArrayOption(
        lambda sizes: (sizes.num_tokens, sizes.num_heads, max(1, sizes.max_keys)), _hide_some_keys
    ),
    "selection": ArrayOption(
        lambda sizes: (sizes.num_seqs, sizes.num_kv_heads, max(1, sizes.max_blocks)),
        _any_blocks,
        "int32",
        Selection,
    ),
}


def _with_columns(problem, value_dim: int):
    shape = (*problem.value_cache.shape[:3], value_dim)
    return problem.replace(value_cache=np.resize(problem.value_cache, shape))


def _latent(problem, _yes: bool):
    return problem.replace(value_cache=None, value_dim=problem.value_cache.shape[3])


def _quantised(problem, cache_dtype):
    """Quantised caches: what they hold is what they are said to hold."""
    dtype, heads = np.dtype(cache_dtype), problem.key_cache.shape[2]
    step = np.float32(0.01 if dtype == np.int8 else 0.1)
    scales = np.resize(np.array([3, 2], np.float32), heads) * step, np.asarray(5 * step)
    key = {"key_cache": _held(problem.key_cache, scales[0], dtype), "key_scale": scales[0]}
    if problem.value_cache is None:
        return problem.replace(**key)
    value = _held(problem.value_cache, scales[1], dtype)
    return problem.replace(**key, value_cache=value, value_scale=scales[1])


def _held(plane, scale, dtype):
    held, bound = plane.astype(np.float32) / scale.reshape(-1, 1), min(127, largest(dtype) or 127)
    return (
        (np.rint(held) if dtype.name in ("int8", "int4") else held)
        .clip(-bound, bound)
        .astype(dtype)
    )


def _with_token_scales(problem, _yes: bool):
    """Quantised caches whose tokens have scales about those of their heads; int4 as bytes."""
    rng, changes = np.random.default_rng(1), {}
    for name in ("key", "value"):
        plane, scale = (getattr(problem, f"{name}_{what}") for what in ("cache", "scale"))
        if plane is None:
            continue
        shape, dtype = scale_shape(plane.shape, plane.dtype), plane.dtype
        of_heads = np.resize(scale, shape[2]).reshape(-1, *[1] * (len(shape) - 3))
        scales = (rng.uniform(0.5, 2, shape) * of_heads).astype(scale_dtype(dtype))
        held = packed(plane.astype(np.int8)) if name_of(dtype) == "int4" else plane
        changes |= {f"{name}_cache": held, f"{name}_scale": scales}
    return problem.replace(**changes)


# Dtypes of caches that any query goes with.
CACHE_DTYPES = tuple(LARGEST)
# What caches differ in, and how a problem whose cache is plain gets it: the columns of the values,
# whether these are some of the keys', the dtype with a scale for each KV head of the keys and one
# of the values, or with per-token scales.
CACHES: dict[str, Callable[[Any, Any], Any]] = {
    "value_dim": _with_columns,
    "latent": _latent,
    "cache_dtype": _quantised,
    "token_scales": _with_token_scales,
}


def _drafts(problem, _yes: bool):
    """Trees of which half the tokens follow the one before them, with several first tokens."""
    own = np.concatenate([*map(np.arange, problem.query_lens), np.zeros(0, int)])
    rng = np.random.default_rng(len(own))
    parents = np.where(rng.random(own.shape) < 0.5, own - 1, rng.integers(-1, np.maximum(own, 0)))
    padding = np.full(len(problem.query) - len(own), -1)
    return problem.replace(parents=np.append(parents, padding))


# What batches differ in, beside lengths, and how a problem gets it: a draft tree.
BATCHES: dict[str, Callable[[Any, Any], Any]] = {"parents": _drafts}
KINDS = CACHES | BATCHES
# All that goes together with causal attention over any cache, in most backends.
EVERY = {
    "scale": 0.4,
    "sliding_window": 9,
    "logits_soft_cap": 2.0,
    "alibi_slopes": signed_slopes,
    "sinks": True,
    "bias": True,
}
# Fields of a spec, arrays, and what caches and batches differ in; alone and together. A function is
# called with the number of query heads; the arrays of a problem are made with it.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.6},
    "sliding_window": {"sliding_window": 5},
    "logits_soft_cap": {"logits_soft_cap": 1.5},
    "alibi_slopes": {"alibi_slopes": signed_slopes},
    **{name: {name: True} for name in ARRAYS},
    "cache_dtype": {"cache_dtype": "float8_e4m3fn"},
    "token_scales": {"cache_dtype": "int8", "token_scales": True},
    "int4": {"cache_dtype": "int4", "token_scales": True},
    "value_dim": {"value_dim": 8},
    "latent": {"value_dim": 8, "latent": True},
    "parents": {"parents": True},
    "latent, token_scales": {
        "cache_dtype": "float8_e4m3fn",
        "token_scales": True,
        "value_dim": 8,
        "latent": True,
    },
    "selection, all": EVERY | {"selection": True, "cache_dtype": "float8_e4m3fn"},
    "selection, causal=False": {"selection": True, "causal": False, "sliding_window": 4},
    "selection, token_scales": {"selection": True, "cache_dtype": "int4", "token_scales": True},
    "causal=False": {"causal": False},
    "causal=False, sliding_window": {"causal": False, "sliding_window": 4},
    "all": EVERY | {"cache_dtype": "float8_e5m2"},
    "token_scales, all": EVERY | {"cache_dtype": "float8_e4m3fn", "token_scales": True},
    "latent, all": EVERY | {"cache_dtype": "float8_e4m3fn", "value_dim": 8, "latent": True},
    "parents, all": EVERY | {"cache_dtype": "int8", "parents": True},
    "causal=False, all": {
        "causal": False,
        "scale": 0.4,
        "sliding_window": 6,
        "logits_soft_cap": 2.0,
        "alibi_slopes": signed_slopes,
    },
}

# The (query_len, key_len) of each sequence.
PHASES: dict[str, tuple[tuple[int, int], ...]] = {
    "prefill": ((5, 5), (17, 17), (1, 1)),
    "chunked prefill": ((6, 31), (16, 20), (1, 9)),
    "decode": ((1, 1), (1, 16), (1, 17), (1, 40)),
    "mixed": ((7, 7), (1, 33), (0, 12), (16, 30), (1, 1)),
    "cross": ((6, 11), (1, 30), (4, 2)),
}


class AttentionKind(NamedTuple):
    """One type of attention: whether its keys are paged, and the phases that it has."""

    paged: bool
    phases: tuple[str, ...]


# A feature that is no phase itself is tried in the last phase of the type.
ATTENTION_TYPES = {
    "decoder": AttentionKind(True, ("prefill", "chunked prefill", "decode", "mixed")),
    "encoder": AttentionKind(False, ("prefill",)),
    "encoder_only": AttentionKind(False, ("prefill",)),
    "encoder_decoder": AttentionKind(True, ("cross",)),
}


def spec_of(options: str, num_heads: int, **fields: Any) -> AttentionSpec:
    """The spec of a name in `OPTIONS`, with some of its fields changed.

    >>> spec_of("alibi_slopes", 2, causal=False).alibi_slopes
    (0.25, -0.5)
    """
    settings = OPTIONS[options] | fields
    settings = {n: value for n, value in settings.items() if n not in (*ARRAYS, *KINDS)}
    return AttentionSpec(**{name: _for_heads(value, num_heads) for name, value in settings.items()})


def arrays_of(options: str) -> tuple[str, ...]:
    """The arrays that a name in `OPTIONS` asks for.

    >>> arrays_of("sinks")
    ('sinks',)
    """
    return tuple(name for name in ARRAYS if name in OPTIONS[options])


def kinds_of(options: str) -> dict[str, Any]:
    """What a name in `OPTIONS` asks of the cache and of the batch.

    >>> kinds_of("latent")
    {'value_dim': 8, 'latent': True}
    """
    return {name: value for name, value in OPTIONS[options].items() if name in KINDS}


def with_kinds(problem, kinds: Mapping[str, Any]):
    """A problem with a plain cache and batch, which gets them as `kinds_of` says."""
    for name, make in KINDS.items():
        if kinds.get(name):
            problem = make(problem, kinds[name])
    return problem


def _for_heads(value: Any | Callable[[int], Any], num_heads: int) -> Any:
    return value(num_heads) if callable(value) else value
