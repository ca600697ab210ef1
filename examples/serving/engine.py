"""Continuous batching: each step is one forward pass over all that the scheduler plans.

A step is padded to one of two shapes, all decode or mixed with chunks of prompts, so two compiled
programs serve every mix of requests.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from pagedattn import BlockPool, KVCache, batch_from_pool
from serving.decoder import Decoder, Tokens, forward_paged
from serving.limits import Limits
from serving.memory import Memory
from serving.owners import Owners, owners_of
from serving.preemption import Preemption, Recompute
from serving.prefix_cache import PrefixCache
from serving.request import NO_ROW, Choice, Group, Request, Streamed
from serving.scheduler import Plan, Scheduler


@dataclass(frozen=True)
class Step:
    """What happened in a step.

    Fields:
      owners: the request in each block after the forward, or `FREE` or `CACHED`.
      scores: for each request that got tokens, the logits that they were chosen from, one row a
        sequence.
      tokens: the new tokens that no later step takes back.
    """

    owners: Owners
    scores: dict[int, Float[np.ndarray, "num_seqs vocab_size"]]
    tokens: list[Streamed]


@partial(jax.jit, static_argnames=("model", "max_query_len", "backend"), donate_argnames="caches")
def next_logits(
    params: dict,
    model: Decoder,
    tokens: Tokens,
    caches: list[KVCache],
    pool: BlockPool,
    query_lens: Int[Array, " max_seqs"],
    max_query_len: int,
    backend: str | None,
) -> tuple[Float[Array, "max_seqs vocab_size"], list[KVCache]]:
    """Scores after each row's last token; the caches are updated in place."""
    shapes = {"num_tokens": len(tokens), "max_query_len": max_query_len}
    batch = batch_from_pool(pool, query_lens, **shapes)
    hidden, caches = forward_paged(params, model, tokens, caches, batch, backend)
    return model.logits(params, hidden[batch.query_start_loc[1:] - 1]), caches


class Engine:
    """Serves requests: call `stream` with them; or `submit` each, then `step` until `idle`.

    `completions` maps the id of a finished request to its completions, one for each sample or beam.
    Raises ValueError for limits beyond the positions that the model knows.
    """

    def __init__(
        self,
        params: dict,
        model: Decoder,
        limits: Limits,
        backend: str | None = None,
        preemption: Callable[[Memory], Preemption] = Recompute,
    ):
        if limits.max_seq_len > model.max_position_embeddings:
            raise ValueError(
                f"expected max_seq_len up to the model's {model.max_position_embeddings} positions,"
                f" got {limits.max_seq_len}"
            )
        self.params, self.model, self.limits, self.backend = params, model, limits, backend
        self.memory = Memory(limits, model, params["embedding"].dtype)
        self.prefixes = PrefixCache(self.memory)
        self.scheduler = Scheduler(self.memory, self.prefixes, preemption(self.memory))
        self.submit = self.scheduler.submit
        self.completions: dict[int, list[list[int]]] = {}

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running)

    def cancel(self, request_id: int) -> bool:
        """Takes back a waiting or running request; returns whether there was one.

        Its rows and blocks are free for others at once, no token of it is streamed any more, and it
        gets no completions. An unknown or finished id changes nothing.
        """
        return self.scheduler.cancel(request_id)

    def stream(self, requests: Iterable[Request]) -> Iterator[Streamed]:
        """Serves the requests; yields each token as soon as no later step can take it back."""
        for request in requests:
            self.submit(request)
        while not self.idle:
            yield from self.step().tokens

    def step(self) -> Step:
        """One forward over the planned tokens; groups whose logits are all there get new tokens."""
        plan = self.scheduler.plan()
        self._forward(plan)
        self.prefixes.keep(self.scheduler.running)
        owners = self.owners()
        ready = [group for group in self.scheduler.running if group.ready]
        scores = {g.request.id: np.stack([s.logits for s in g.sequences]) for g in ready}
        return Step(owners, scores, [token for group in ready for token in self._advance(group)])

    def owners(self) -> Owners:
        return owners_of(self.memory, self.scheduler.running)

    def _forward(self, plan: Plan) -> None:
        """Feeds the planned tokens; sequences that have no more to feed get their logits."""
        tokens, query_lens, max_query_len = self._pack(plan)
        logits, self.memory.caches = next_logits(
            self.params,
            self.model,
            tokens,
            self.memory.caches,
            self.memory.pool,
            query_lens,
            max_query_len,
            self.backend,
        )
        rows = np.asarray(logits)
        for sequence, length in plan:
            sequence.num_cached += length
            if not sequence.num_pending:
                sequence.logits = rows[sequence.row]

    def _pack(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, int]:
        """(tokens, query_lens, max_query_len) of a plan, tokens in row order, padded to a shape."""
        limits, decoding = self.limits, all(length == 1 for _, length in plan)
        query_lens = np.zeros(limits.max_seqs, np.int32)
        tokens = np.zeros(limits.max_seqs if decoding else limits.token_budget, np.int32)
        start = 0
        for sequence, length in sorted(plan, key=lambda step: step[0].row):
            query_lens[sequence.row] = length
            new = sequence.tokens[sequence.num_cached : sequence.num_cached + length]
            tokens[start : start + length] = new
            start += length
        return tokens, query_lens, 1 if decoding else limits.max_query_len

    def _advance(self, group: Group) -> list[Streamed]:
        """Appends the tokens that the group's decoding chooses; retires a group that is done."""
        request, decoding = group.request, group.request.decoding
        choices = decoding.choose(group, self.model.stop_tokens)
        full = len(group.completion(group.sequences[0])) + 1 == request.max_new_tokens
        choices = [c._replace(reason=c.reason or ("length" if full else None)) for c in choices]
        succeed(self.memory, group, choices)
        if not group.sequences:
            self.scheduler.retire(group)
            self.completions[request.id] = group.completions()
        return decoding.settled(group, choices)


def succeed(memory: Memory, group: Group, choices: list[Choice]) -> None:
    """Replaces a group's sequences by those that the choices make of them.

    A parent's first live choice goes on in the parent's row, its others in forks of that row.
    """
    parents, live = group.sequences, [choice for choice in choices if not choice.final]
    group.finished += [parents[c.parent].followed_by(c, NO_ROW) for c in choices if c.final]
    survivors = {choice.parent for choice in live}
    ended = [s.row for i, s in enumerate(parents) if i not in survivors]
    memory.release(ended)
    group.spare_rows += ended
    rows = [parents[choice.parent].row for choice in live]
    forked = [i for i, row in enumerate(rows) if rows.index(row) < i]
    children = [group.spare_rows.pop() for _ in forked]
    memory.fork([rows[i] for i in forked], children)
    for i, child in zip(forked, children, strict=True):
        rows[i] = child
    chosen = zip(live, rows, strict=True)
    group.sequences = [parents[choice.parent].followed_by(choice, row) for choice, row in chosen]
