"""Decodes in bfloat16 over caches of four bits, for all who read them."""

from typing import Any

import ml_dtypes

from pagedattn import AttentionSpec
from pagedattn.testing import Problem, random_problem

INT4_DECODES: dict[str, dict[str, Any]] = {
    "group of 4": {"num_heads": 8, "num_kv_heads": 2},
    "group of 3": {"num_heads": 12, "num_kv_heads": 4},
    "one query head a KV head": {"num_heads": 2, "num_kv_heads": 2},
    "odd KV heads": {"num_heads": 6, "num_kv_heads": 3},
    "group of 8": {"num_heads": 16, "num_kv_heads": 2},
    "group of 5": {"num_heads": 5, "num_kv_heads": 1},
    "blocks of 64": {"block_size": 64},
    "cap": {"spec": AttentionSpec(logits_soft_cap=5.0)},
    "window": {"spec": AttentionSpec(sliding_window=70)},
    "window of encoders": {"spec": AttentionSpec(causal=False, sliding_window=70)},
    "negative scale": {"spec": AttentionSpec(scale=-0.1)},
    "sinks": {"arrays": ["sinks"]},
    "sinks, cap and window": {
        "spec": AttentionSpec(sliding_window=9, logits_soft_cap=3.0),
        "arrays": ["sinks"],
    },
}


def int4_decodes(name: str, **changes) -> Problem:
    """Of whole steps of keys, of some with a part of one, of a part, of none; and padding."""
    sizes = {"head_dim": 128, "block_size": 16, "pad_tokens": 7, "max_query_len": 1}
    kinds = {"cache_dtype": "int4", "dtype": ml_dtypes.bfloat16, "token_scales": True}
    given = {"spec": AttentionSpec()} | sizes | INT4_DECODES[name] | changes
    return random_problem([1, 1, 0, 1, 1], [320, 203, 40, 0, 1], **given, **kinds)
