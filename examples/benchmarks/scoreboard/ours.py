"""This library, by the same questions."""

import dataclasses

import numpy as np

from benchmarks.scoreboard.peer import Answer, Peer
from pagedattn import AttentionSpec
from pagedattn.testing import Problem, attend


def pagedattn(problem: Problem) -> Answer:
    out, lse = attend(problem, backend=None)
    return np.asarray(out, np.float32), np.asarray(lse)


EVERY = frozenset(
    {field.name for field in dataclasses.fields(AttentionSpec) if field.name != "causal"}
    | {"sinks", "bias", "selection", "cache_dtype", "token_scales", "value_dim", "latent", "lse"}
    | {"parents", "causal=False", "float16", "float32"}
)
OURS = {
    "pagedattn": Peer(
        pagedattn,
        EVERY,
        modules=("pagedattn",),
        install="pip install pagedattn",
        packages=("pagedattn", "jax", "numba"),
        device="cpu",
        about="`paged_attention` with `backend=None`, on a CPU",
    )
}
