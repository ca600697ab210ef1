"""Layers with a window beside layers without: a pool for each, and the tokens of a dense model."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY, Sampling
from pagedattn_serving.decoding.sampling_device import pick
from pagedattn_serving.demo.occupancy import blocks_used, plot_occupancy
from pagedattn_serving.demo.parity import dense_logits
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute, Swap
from pagedattn_serving.families.mistral import Mistral
from tiny import LIMITS, QUICK, ROOMY, TINY, serve, tiny_params, tiny_requests

pytestmark = pytest.mark.usefixtures("exact_products")
BOTH = Mistral(**vars(TINY), layer_types=("full_attention", "sliding_attention"), sliding_window=6)
TIGHT = replace(LIMITS, num_blocks=10)
SWAP = partial(Swap, num_blocks=20, num_rows=5)
MOST = 4  # blocks that a step of 8 tokens, and the 5 before it, may lie in


def engine_of(limits=ROOMY, preemption=Recompute, model=BOTH) -> Engine:
    return Engine(tiny_params(), model, limits, QUICK, preemption)


def nothing_is_lost(engine):
    held, pools = engine.prefixes.num_held, engine.memory.pools
    assert [blocks.num_free for blocks in pools] == [
        blocks.num_blocks - count for blocks, count in zip(pools, held, strict=True)
    ]
    engine.prefixes.evict(held)
    assert [blocks.num_free for blocks in pools] == engine.memory.num_blocks


def check(engine, requests):
    """Every token is the likeliest after those before it, by a model that has no cache."""
    for request in requests:
        (completion,) = engine.completions[request.id]
        text = np.zeros((1, 48), np.int32)  # one shape, so that one program judges all
        text[0, : len(request.prompt) + len(completion)] = [*request.prompt, *completion]
        logits = np.asarray(dense_logits(tiny_params(), engine.model, text))[0]
        after = logits[len(request.prompt) - 1 :][: len(completion)]
        assert completion == after.argmax(axis=-1).tolist()


@pytest.mark.parametrize("policy", [Recompute, SWAP])
def test_preempted_requests_answer_as_a_dense_model_does(policy):
    engine = engine_of(TIGHT, policy)
    prompt = tiny_requests((18,))[0].prompt
    alike = [Request(20 + i, (*prompt[: 9 + i], i), 9, GREEDY) for i in range(4)]
    requests = [*tiny_requests(), *alike]
    serve(engine, requests)
    assert engine.scheduler.num_preemptions > 0
    assert engine.prefixes.num_hit_tokens > 0
    check(engine, requests)
    nothing_is_lost(engine)


def test_samples_share_and_copy_blocks_of_both_pools():
    request = replace(tiny_requests((10,), Sampling(1.0, 3, seed=2))[0], max_new_tokens=14)
    engine = engine_of()
    serve(engine, [request])
    for sample, completion in enumerate(engine.completions[0]):
        text = np.zeros((1, 48), np.int32)
        text[0, :24] = [*request.prompt, *completion]
        logits = np.asarray(dense_logits(tiny_params(), BOTH, text))[0]
        assert completion == [int(pick(logits[n - 1], 2, sample, n, 1.0)) for n in range(10, 24)]
    nothing_is_lost(engine)


def test_blocks_behind_the_window_are_given_back_while_serving():
    engine = engine_of()
    engine.prefixes.keep = lambda groups: None  # which would hold them
    assert engine.memory.num_blocks == [ROOMY.num_blocks, ROOMY.max_seqs * MOST]
    requests = [Request(i, (3, 1, 4, i) * 5, 20, GREEDY) for i in range(3)]
    steps = serve(engine, requests)
    owners = np.stack([step.owners for step in steps])
    full, windowed = np.split(owners, [ROOMY.num_blocks], axis=1)
    assert blocks_used(full).max() == 3 * 10  # of 39 tokens each
    assert blocks_used(windowed).max() <= 3 * MOST
    assert blocks_used(windowed[-10:]).max() <= 3 * 3  # six tokens are in sight
    pools, _ = plot_occupancy(owners, 20, engine.memory.num_blocks).axes
    assert [list(line.get_ydata()) for line in pools.lines][-1] == [59.5, 59.5]
    check(engine, requests)


def test_a_model_with_windows_alone_serves_more_than_its_pool_holds():
    model = replace(BOTH, layer_types=("sliding_attention",) * 2)
    engine = engine_of(replace(ROOMY, num_blocks=MOST, max_seqs=2), model=model)
    requests = [Request(i, (3, 1, 4, i) * 5, 20, GREEDY) for i in range(2)]
    serve(engine, requests)
    check(engine, requests)
    with pytest.raises(ValueError, match="at most 8 fit"):
        engine.submit(Request(3, (1,) * 9, 2, Sampling(num_samples=2)))


def test_a_prefix_is_found_as_far_as_every_pool_has_what_is_seen():
    prompt, engine = tiny_requests((25,))[0].prompt, engine_of()
    serve(engine, [Request(0, prompt, 2, GREEDY)])
    full, windowed = engine.prefixes.pools
    names = list(full.named)[::-1]  # the first of a text were used last
    assert list(windowed.named)[::-1] == names
    assert len(names) == 6

    def hits(index):
        before = engine.prefixes.num_hit_tokens
        requests = [Request(index, prompt, 5, GREEDY)]
        serve(engine, requests)
        check(engine, requests)
        return engine.prefixes.num_hit_tokens - before

    def forget(pool, *columns):
        pool.blocks.drop([pool.named.pop(names[column]) for column in columns])

    forget(windowed, 0, 1, 2, 3)  # the next token sees the last two
    assert hits(1) == 24
    forget(windowed, 5)
    assert hits(2) == 0  # of 20 tokens, the fourth block would be seen
    forget(full, 2)
    assert hits(3) == 8
    nothing_is_lost(engine)
