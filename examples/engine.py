"""Continuous batching: one forward a step for whatever the scheduler plans, greedily decoded.

A step is padded to one of two shapes, all decode or mixed with chunks of prompts, so two compiled
programs serve every mix of requests.
"""

from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int
from llama import LlamaConfig, Tokens, forward_paged, logits_of
from scheduler import Limits, Scheduler, Sequence

from pagedattn import BatchMetadata, KVCache, init_kv_cache, make_batch


@dataclass(frozen=True)
class Step:
    """What happened in a step.

    Fields:
      owners: the request in each block while the step ran, -1 for none.
      scores: for each request that got a token, the logits that it was chosen from.
    """

    owners: Int[np.ndarray, " num_blocks"]
    scores: dict[int, Float[np.ndarray, " vocab_size"]]


@partial(jax.jit, static_argnames=("config", "backend"), donate_argnames="caches")
def next_logits(
    params: dict,
    config: LlamaConfig,
    tokens: Tokens,
    caches: list[KVCache],
    batch: BatchMetadata,
    backend: str | None,
) -> tuple[Float[Array, "num_seqs vocab_size"], list[KVCache]]:
    """Scores after each sequence's last token; the caches are updated in place."""
    hidden, caches = forward_paged(params, config, tokens, caches, batch, backend)
    return logits_of(params, hidden[batch.query_start_loc[1:] - 1]), caches


class Engine:
    """Serves requests: `submit` them, then `step` until `idle`; `completions` are by request id.

    Raises ValueError for limits beyond the positions that the model knows.
    """

    def __init__(
        self, params: dict, model: LlamaConfig, limits: Limits, backend: str | None = None
    ):
        if limits.max_seq_len > model.max_position_embeddings:
            raise ValueError(
                f"expected max_seq_len up to the model's {model.max_position_embeddings} positions,"
                f" got {limits.max_seq_len}"
            )
        self.params, self.model, self.limits, self.backend = params, model, limits, backend
        self.scheduler = Scheduler(limits)
        self.submit = self.scheduler.submit
        self.completions: dict[int, list[int]] = {}
        shape = (limits.num_blocks, limits.block_size, model.num_key_value_heads, model.head_dim)
        dtype = params["embedding"].dtype
        self.caches = [init_kv_cache(*shape, dtype=dtype) for _ in params["layers"]]

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running)

    def step(self) -> Step:
        """Runs every planned sequence once."""
        plan = self.scheduler.plan()
        tokens, batch = self._pack(plan)
        logits, self.caches = next_logits(
            self.params, self.model, tokens, self.caches, batch, self.backend
        )
        owners = self.scheduler.owners.copy()
        return Step(owners, self._advance(plan, np.asarray(logits)))

    def _pack(self, plan) -> tuple[Int[np.ndarray, " num_tokens"], BatchMetadata]:
        """The plan as arrays of one of the two shapes."""
        limits, decoding = self.limits, all(length == 1 for _, length in plan)
        num_tokens = limits.max_seqs if decoding else limits.token_budget
        batch = make_batch(
            [length for _, length in plan],
            [sequence.num_cached for sequence, _ in plan],
            [sequence.blocks for sequence, _ in plan],
            block_size=limits.block_size,
            pad_tokens=num_tokens,
            pad_seqs=limits.max_seqs,
            pad_blocks=limits.blocks_for(limits.max_seq_len),
            max_query_len=1 if decoding else limits.max_query_len,
        )
        new = [t for s, length in plan for t in s.tokens[s.num_cached : s.num_cached + length]]
        return np.array(new + [0] * (num_tokens - len(new)), np.int32), batch

    def _advance(self, plan, logits: Float[np.ndarray, "num_seqs vocab_size"]) -> dict:
        """Counts the step's tokens as cached; a sequence with none pending gets its next one."""
        chosen = {}
        for row, (sequence, length) in enumerate(plan):
            sequence.num_cached += length
            if not sequence.num_pending:
                chosen[sequence.request.id] = logits[row]
                sequence.tokens.append(int(logits[row].argmax()))
                self._retire_if_finished(sequence)
        return chosen

    def _retire_if_finished(self, sequence: Sequence) -> None:
        completion = sequence.completion
        full = len(completion) == sequence.request.max_new_tokens
        if full or completion[-1] in self.model.stop_tokens:
            self.completions[sequence.request.id] = completion
            self.scheduler.release(sequence)
