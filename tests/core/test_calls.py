"""How many functions of the library an eager call runs: of each Python takes its share."""

import functools
import gc
import importlib.util
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedattn import KVCache, make_batch, paged_attention
from pagedattn._dispatch.registry import Framework, can_load

PACKAGES = "pagedattn", "pagedattn_torch", "pagedattn_interop"
MOST = {
    (Framework.JAX, "xla"): 120,
    (Framework.TORCH, "sdpa"): 200,
    (Framework.TORCH, "numba"): 200,
}
KEYS, BLOCK_SIZE = 64, 16


def folders() -> dict[str, str]:
    """The names of the library's packages by where they lie."""
    specs = filter(None, map(importlib.util.find_spec, PACKAGES))
    return {f"{Path(spec.origin).parent}/": spec.name for spec in specs if spec.origin}


def calls_of(fn) -> Counter[str]:
    """The calls of functions of the library while `fn` runs, by file."""
    fn()  # what happens once only: imports, caches
    gc.collect()  # a generator that earlier tests left half-way is entered once more to be closed
    entered = Counter()

    def count(frame, event, _):
        if event == "call":
            entered[frame.f_code.co_filename] += 1

    before = sys.getprofile()
    gc.disable()
    sys.setprofile(count)
    try:
        fn()
    finally:
        sys.setprofile(before)
        gc.enable()
    return Counter(
        {
            path.replace(folder, f"{name}/"): calls
            for path, calls in entered.items()
            for folder, name in folders().items()
            if path.startswith(folder)
        }
    )


def decode(framework: Framework, backend: str, num_seqs: int):
    """A decode of `num_seqs` sequences of KEYS keys, all arrays of the framework."""
    blocks = np.arange(num_seqs * KEYS // BLOCK_SIZE).reshape(num_seqs, -1)
    batch = make_batch([1] * num_seqs, [KEYS - 1] * num_seqs, blocks, block_size=BLOCK_SIZE)
    plane = np.zeros((blocks.size, BLOCK_SIZE, 2, 64), np.float32)
    query = np.ones((num_seqs, 8, 64), np.float32)
    attend, to = paged_attention, jnp.asarray
    if framework is Framework.TORCH:
        attend = importlib.import_module("pagedattn_torch").paged_attention
        to = importlib.import_module("torch").tensor
    arrays = (
        to(query),
        KVCache(to(plane), to(plane)),
        jax.tree.map(lambda x: to(np.array(x)), batch),
    )
    return functools.partial(attend, *arrays, backend=backend)


@pytest.fixture(params=MOST, ids=" ".join)
def route(request):
    framework, backend = request.param
    if not can_load(backend, framework):
        pytest.skip(f"{backend} is not installed")
    return framework, backend


def test_an_eager_call_makes_few(route):
    calls = calls_of(decode(*route, num_seqs=4))
    assert 0 < calls.total() <= MOST[route], calls.most_common(12)


def test_as_many_for_more_sequences(route):
    few, many = (calls_of(decode(*route, num_seqs=count)) for count in (4, 32))
    assert few == many, {"more": many - few, "fewer": few - many}
