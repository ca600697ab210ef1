"""The sdpa backend gathers long sequences in turns; here short ones, on little room."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pagedattn import AttentionSpec
from pagedattn._dispatch.call import call_of
from pagedattn.testing import batch_of, cache_of, check_backend, random_problem
from pagedattn_torch.arrays import batch_on
from pagedattn_torch.backends import sdpa
from pagedattn_torch.backends.sdpa import grouping, parts

TOKEN_BYTES = 2 * 2 * 16 * 4  # two KV heads of 16 float32, key and value


@pytest.mark.parametrize(("keys", "keys_a_turn", "rows"), [(0, 4, 1), (8, 4, 6), (24, 8, 768)])
def test_matches_the_oracle(monkeypatch, keys, keys_a_turn, rows):
    """Blocks of 4 tokens: one at a time, two sequences by turns, six."""
    monkeypatch.setattr(sdpa, "SCRATCH_BYTES", keys * TOKEN_BYTES)
    monkeypatch.setattr(parts, "TILE_ROWS", rows)
    monkeypatch.setattr(grouping, "KEYS_A_TURN", keys_a_turn)
    check_backend("sdpa", verbose=False)


def test_a_long_sequence_takes_turns_beside_its_like():
    problem = random_problem([1, 1, 1], [512, 512, 90], AttentionSpec())
    batch = batch_on(batch_of(problem), "cpu")
    call = call_of(jnp.asarray(problem.query), cache_of(problem), batch, problem.spec)
    long, short = grouping.make_buckets(replace(call, device="cpu"), batch, 512)
    assert (long.size, len(list(long.spans())), short.size) == (2, 2, 1)
    assert np.all(long.rows.num_keys.numpy() == 512)
