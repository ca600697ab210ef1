"""Greedy decoding with random trees of drafts, PAGEDATTN_EXAMPLES of them: 5 000."""

import os

import numpy as np
import pytest

pytest.importorskip("safetensors")  # the models read checkpoints

import speculative as example
from drafts.lookup import Drafts
from tiny import TINY, tiny_params

pytestmark = pytest.mark.usefixtures("exact_products")
TREES = int(os.environ.get("PAGEDATTN_EXAMPLES", "5000"))
SEQS, NEW = 6, 30


def random_drafts(rng, text: str, whole: str, lines: int, depth: int) -> Drafts:
    """Some right, others not, in any shape; `whole` is what the model itself goes on with."""
    drafts, depths = Drafts([ord(text[-1])], [-1]), [0]
    for _ in range(rng.integers(0, lines * depth, endpoint=True)):
        shallow = [i for i, at in enumerate(depths) if at < depth]
        parent = int(rng.choice(shallow))
        at = len(text) + depths[parent]
        right = at < len(whole) and rng.random() < 0.6
        drafts.tokens.append(ord(whole[at]) if right else int(rng.integers(TINY.vocab_size)))
        drafts.parents.append(parent)
        depths.append(depths[parent] + 1)
    return drafts


def test_the_tokens_are_those_of_plain_decoding(monkeypatch):
    params, seen, accepted, seed = tiny_params(), 0, 0.0, 0
    while seen < TREES:
        rng, seed = np.random.default_rng(seed), seed + 1
        letters = rng.integers(TINY.vocab_size, size=(SEQS, 12)).tolist()
        texts = ["".join(map(chr, [s, *row])) for s, row in enumerate(letters)]
        plain, _ = example.generate(params, TINY, texts, NEW + 8, "plain")
        wholes = {text[0]: text for text in plain}  # by their first tokens, which differ

        def look_up(text, lines, depth, rng=rng, wholes=wholes):
            nonlocal seen
            seen += 1
            return random_drafts(rng, text, wholes[text[0]], lines, depth)

        with monkeypatch.context() as patch:
            patch.setattr(example, "look_up", look_up)
            texts, a_step = example.generate(params, TINY, texts, NEW, "trees")
        assert texts == [text[:-8] for text in plain], f"seed {seed - 1}"
        accepted = max(accepted, a_step)
    print(f"{seen} trees, at most {accepted:.2f} tokens a step on average")
    assert accepted > 1.5
