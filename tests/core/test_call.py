"""What follows from the sizes of a call, by trying every sequence that it may have."""

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pagedattn import AttentionSpec
from pagedattn._dispatch.call import Call, Strides
from pagedattn.testing.visibility import visible_keys


@st.composite
def calls(draw):
    block_size, max_blocks = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    spec = AttentionSpec(
        causal=draw(st.booleans()), sliding_window=draw(st.none() | st.integers(1, 30))
    )
    sizes = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    return a_call(block_size, max_blocks, spec, *sizes)


def a_call(block_size, max_blocks, spec, num_tokens, max_query_len):
    return Call(
        num_tokens=num_tokens,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        num_blocks=9,
        block_size=block_size,
        num_seqs=2,
        max_blocks=max_blocks,
        max_query_len=max_query_len,
        dtype="float32",
        device="cpu",
        strides=Strides((), (), ()),
        spec=spec,
    )


def visible_masks(call, spec):
    """Of every sequence that its table holds, and that brings no more queries than the call may."""
    most = min(call.max_query_len, call.num_tokens)
    capacity = call.block_size * call.max_blocks
    lengths = itertools.product(range(1, most + 1), range(1, capacity + 1))
    return [visible_keys(query_len, seq_len, spec) for query_len, seq_len in lengths]


@given(call=calls())
@example(call=a_call(1, 2, AttentionSpec(causal=False, sliding_window=5), 5, 9))
@example(call=a_call(1, 2, AttentionSpec(causal=False, sliding_window=4), 5, 9))
def test_a_window_is_one_where_it_may_hide_a_key(call):
    whole = AttentionSpec(causal=call.spec.causal)
    masks = zip(visible_masks(call, call.spec), visible_masks(call, whole), strict=True)
    hides = any((seen != all_).any() for seen, all_ in masks)
    assert call.window == (call.spec.sliding_window if hides else None)


@given(call=calls())
def test_the_most_keys_and_blocks_that_a_sequence_sees(call):
    seen = [np.flatnonzero(mask.any(axis=0)) for mask in visible_masks(call, call.spec)]
    seen = [keys for keys in seen if keys.size]
    assert call.max_keys == max(map(len, seen))
    assert call.visible_blocks == max(len(np.unique(keys // call.block_size)) for keys in seen)
