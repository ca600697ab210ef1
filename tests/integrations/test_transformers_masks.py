"""transformers' masks as lengths: attention over what the mask shows, or an error."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("transformers", minversion="5.23")

import transformers
from transformers import masking_utils as theirs

import pagedattn_torch.transformers as ours
from pagedattn import UnsupportedError

NAME = ours.register()
FUNCTIONS = {
    "causal": lambda _: theirs.causal_mask_function,
    "causal window": theirs.sliding_window_causal_mask_function,
    "symmetric": lambda _: theirs.bidirectional_mask_function,
    "symmetric window": theirs.sliding_window_bidirectional_mask_function,
    "chunks": lambda size: theirs.chunked_causal_mask_function(
        size, torch.zeros(2, dtype=torch.int64)
    ),
}
GENERATOR = torch.Generator()


@st.composite
def masks(draw, kinds=tuple(FUNCTIONS), paddings=("none", "left", "right", "anywhere")):
    """The arguments of transformers' mask interface, of dense, cut and static caches."""
    context, new = draw(st.integers(0, 6)), draw(st.integers(1, 6))
    dropped = draw(st.integers(0, context))  # as of the cache of a sliding layer
    empty = draw(st.integers(0, 4))
    kind, size = draw(st.sampled_from(kinds)), draw(st.integers(1, 8))
    arguments = {
        "batch_size": 2,
        "q_length": new,
        "kv_length": context - dropped + new + empty,
        "q_offset": draw(st.sampled_from([int, torch.tensor]))(context),
        "kv_offset": dropped,
        "mask_function": FUNCTIONS[kind](size),
        "local_size": size if "window" in kind else None,
    }
    padding, total = draw(st.sampled_from(paddings)), context + new
    if padding != "none":
        places = torch.arange(total)
        real = [draw(st.integers(1, total)) for _ in range(2)]
        shown = {
            "left": lambda n: places >= total - n,
            "right": lambda n: places < n,
            "anywhere": lambda _: torch.tensor(
                draw(st.lists(st.booleans(), min_size=total, max_size=total))
            ),
        }[padding]
        arguments["attention_mask"] = torch.stack([shown(n) for n in real])
    return arguments


def results(arguments):
    """(out, what torch's attention gives with the dense mask, which rows are those of tokens)."""
    shown: Any = theirs.sdpa_mask(**arguments, allow_is_causal_skip=False)
    sizes = (2, 1, arguments["q_length"], 8), *[(2, 1, arguments["kv_length"], 8)] * 2
    query, key, value = (torch.randn(n, generator=GENERATOR.manual_seed(0)) for n in sizes)
    module = torch.nn.Module()
    mask = transformers.AttentionMaskInterface()[NAME](**arguments)
    assert mask.shape == shown.shape
    out, _ = transformers.AttentionInterface()[NAME](module, query, key, value, mask)
    dense = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=shown)
    real = torch.ones(2, arguments["q_length"], dtype=torch.bool)
    if "attention_mask" in arguments:
        first = int(arguments["q_offset"])
        real = arguments["attention_mask"][:, first : first + arguments["q_length"]]
    # A row that sees no key has no defined result there.
    return out[:, :, 0], dense[:, 0], real & shown[:, 0].any(-1)


@given(masks())
def test_attention_is_that_of_the_dense_mask_or_refused(arguments):
    try:
        out, expected, real = results(arguments)
    except UnsupportedError:  # which causal and symmetric masks do not raise, as below
        return
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=2e-6)


@given(masks(["causal", "causal window"], ["none", "left", "right"]))
def test_causal_masks_are_computed_whatever_the_cache(arguments):
    out, expected, real = results(arguments)
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=2e-6)


@given(masks(["causal"]))
def test_causal_masks_are_computed_whatever_the_padding(arguments):
    out, expected, real = results(arguments)
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=2e-6)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 8))
def test_symmetric_windows_are_computed(length, size, padding):
    """transformers counts the distance, without the token itself."""
    shown = torch.ones(2, length, dtype=torch.bool)
    shown[0, : min(padding, length - 1)] = False
    arguments = {"batch_size": 2, "q_length": length, "kv_length": length, "local_size": size}
    function = FUNCTIONS["symmetric window"](size)
    out, expected, real = results(
        arguments | {"mask_function": function, "attention_mask": shown, "q_offset": 0}
    )
    torch.testing.assert_close(out[real], expected[real], rtol=0, atol=2e-6)


@given(masks(paddings=("anywhere",)))
def test_one_query_sees_whatever_its_mask_shows(arguments):
    """A decode step, also of chunks, and of a window over padding between tokens."""
    arguments["kv_length"] += 1 - arguments["q_length"]
    arguments["q_length"] = 1
    out, expected, _ = results(arguments)
    shown: Any = theirs.sdpa_mask(**arguments, allow_is_causal_skip=False)
    some = shown[:, 0].any(-1)
    torch.testing.assert_close(out[some], expected[some], rtol=0, atol=2e-6)


def test_a_window_over_padding_between_tokens_is_refused():
    """Where the padding is left out, tokens are nearer to each other than the mask counts."""
    shown = torch.tensor([[1, 1, 0, 0, 1, 1]] * 2).bool()
    arguments = {"batch_size": 2, "q_length": 6, "kv_length": 6, "attention_mask": shown}
    window = {"mask_function": FUNCTIONS["causal window"](3), "local_size": 3}
    with pytest.raises(UnsupportedError, match="padding between tokens"):
        results(arguments | window)
