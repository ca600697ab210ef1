"""What attention calls differ in: options, phases, types of attention, dtypes.

The only list of them: the printed table, `check_backend`, the strategies and the tests use it.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..spec import AttentionSpec

DTYPES = ("float32", "bfloat16", "float16")


def signed_slopes(num_heads: int) -> tuple[float, ...]:
    """ALiBi slopes of both signs, one for each query head.

    >>> signed_slopes(3)
    (0.25, -0.5, 0.75)
    """
    return tuple((-1.0) ** head * 0.25 * (head + 1) for head in range(num_heads))


# Options of a call that are arrays, keywords of `paged_attention`.
ARRAYS = ("sinks", "bias")
# Dtypes of caches that any query goes with.
CACHE_DTYPES = ("float8_e4m3fn", "float8_e5m2", "int8")
# What caches differ in: dtype, the columns of the values, whether these are some of the keys'.
CACHES = ("cache_dtype", "value_dim", "latent")
# All that goes together with causal attention over any cache.
EVERY = {
    "scale": 0.4,
    "sliding_window": 9,
    "logits_soft_cap": 2.0,
    "alibi_slopes": signed_slopes,
    "sinks": True,
    "bias": True,
}
# Fields of a spec, arrays, and what caches differ in; alone and together. A function is called with
# the number of query heads; the arrays of a problem are made with it.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.6},
    "sliding_window": {"sliding_window": 5},
    "logits_soft_cap": {"logits_soft_cap": 1.5},
    "alibi_slopes": {"alibi_slopes": signed_slopes},
    "sinks": {"sinks": True},
    "bias": {"bias": True},
    "cache_dtype": {"cache_dtype": "float8_e4m3fn"},
    "value_dim": {"value_dim": 8},
    "latent": {"value_dim": 8, "latent": True},
    "causal=False": {"causal": False},
    "causal=False, sliding_window": {"causal": False, "sliding_window": 4},
    "all": EVERY | {"cache_dtype": "float8_e5m2"},
    "latent, all": EVERY | {"cache_dtype": "float8_e4m3fn", "value_dim": 8, "latent": True},
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
    settings = {n: value for n, value in settings.items() if n not in (*ARRAYS, *CACHES)}
    return AttentionSpec(**{name: _for_heads(value, num_heads) for name, value in settings.items()})


def arrays_of(options: str) -> tuple[str, ...]:
    """The arrays that a name in `OPTIONS` asks for.

    >>> arrays_of("sinks")
    ('sinks',)
    """
    return tuple(name for name in ARRAYS if name in OPTIONS[options])


def cache_of(options: str) -> dict[str, Any]:
    """What a name in `OPTIONS` asks of the cache.

    >>> cache_of("latent")
    {'value_dim': 8, 'latent': True}
    """
    return {name: value for name, value in OPTIONS[options].items() if name in CACHES}


def _for_heads(value: Any | Callable[[int], Any], num_heads: int) -> Any:
    return value(num_heads) if callable(value) else value
