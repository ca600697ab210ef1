"""Continuous batching: each step is one forward pass over all that the scheduler plans.

A step is padded to one of two shapes, all decode or mixed with chunks of prompts, so two compiled
programs serve every mix of requests; a small one after them chooses the tokens on the device. The
two may round otherwise, for the order of a matrix product's sums follows from its number of rows:
a `batch_invariant` engine pads all steps to the larger shape, so that one program computes every
token, in rows that know nothing of each other.

The device never waits for the host: while it runs a forward, the host plans the next one, which
takes the tokens that it does not know yet from the device. It reads them one step late. What was
computed meanwhile for a sequence that has met a stop token is dropped.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float

from pagedattn_serving.blocks.cache_dtypes import cache_dtype
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.blocks.memory import Memory
from pagedattn_serving.decoding.request import (
    NO_ROW,
    NO_TOKEN,
    Draw,
    Found,
    Group,
    Request,
    Sequence,
    Streamed,
    Turn,
)
from pagedattn_serving.decoding.sampling_device import Drawn, enqueue
from pagedattn_serving.engine.next_logits import next_logits
from pagedattn_serving.engine.owners import Holdings, Owners, holdings_of
from pagedattn_serving.engine.preemption import Preemption, Recompute
from pagedattn_serving.engine.prefix_cache import PrefixCache
from pagedattn_serving.engine.scheduler import Plan, Scheduler
from pagedattn_serving.families.decoder import Decoder


@dataclass(frozen=True)
class Step:
    """What the host has read in a step: the tokens of the forward before.

    Fields:
      tokens: the new tokens that no later step takes back; none if there was nothing to read.
      holdings: who had which blocks when that forward was enqueued.
      logits: that forward's, a row a sequence, on the device.
      rows: of each request that got tokens, the rows that they were chosen from.
    """

    tokens: list[Streamed]
    holdings: Holdings
    logits: Float[Array, "max_seqs vocab_size"] | None = None
    rows: dict[int, list[int]] = field(default_factory=dict)

    @property
    def owners(self) -> Owners:
        """The request in each block, or `FREE` or `CACHED`."""
        return self.holdings.owners()

    @property
    def scores(self) -> dict[int, Float[np.ndarray, "num_draws vocab_size"]]:
        """The logits behind each request's tokens: they come from the device when asked for."""
        logits = np.asarray(self.logits) if self.rows else np.empty(0)
        return {request: logits[rows] for request, rows in self.rows.items()}


class Flight(NamedTuple):
    """A forward that is enqueued, and whose tokens have not been read."""

    drawn: Drawn
    logits: Float[Array, "max_seqs vocab_size"]
    holdings: Holdings


class Engine:
    """Serves requests: call `stream` with them; or `submit` each, then `step` until `idle`.

    `completions` maps the id of a finished request to its completions, one for each sample or beam.
    A request for which the model computes NaN gets none: its last tokens say so; others go on.
    With `batch_invariant` the log-probabilities of a request have the same bits alone and in any
    company, whatever is cached or preempted: those of one compiled step, which the model, limits,
    backend and kind of device decide.
    `kv_cache_dtype` is one of `CACHE_DTYPES`; caches of fewer bits have scales for each token.
    Raises ValueError for limits beyond the positions that the model knows, and for other words.
    """

    def __init__(
        self,
        params: dict,
        model: Decoder,
        limits: Limits,
        backend: str | None = None,
        preemption: Callable[[Memory], Preemption] = Recompute,
        batch_invariant: bool = False,
        kv_cache_dtype: str = "auto",
    ):
        if limits.max_seq_len > model.max_position_embeddings:
            raise ValueError(
                f"expected max_seq_len up to the model's {model.max_position_embeddings} positions,"
                f" got {limits.max_seq_len}"
            )
        self.params, self.model, self.limits, self.backend = params, model, limits, backend
        self.batch_invariant = batch_invariant
        dtype = cache_dtype(kv_cache_dtype, params["embedding"].dtype)
        self.memory = Memory(limits, model, dtype)
        self.prefixes = PrefixCache(self.memory)
        self.scheduler = Scheduler(self.memory, self.prefixes, preemption(self.memory))
        self.completions: dict[int, list[list[int]]] = {}
        self._flight: Flight | None = None

    @property
    def idle(self) -> bool:
        return not (self.scheduler.waiting or self.scheduler.running)

    def submit(self, request: Request) -> None:
        """Queues a request.

        Raises ValueError if it could never run, has tokens that the model lacks, or an id in use.
        """
        lacking = [token for token in request.prompt if not 0 <= token < self.model.vocab_size]
        if lacking:
            raise ValueError(
                f"expected tokens from 0 to {self.model.vocab_size - 1} in the prompt of request "
                f"{request.id}, got {lacking[0]}"
            )
        self.scheduler.submit(request)

    def update_weights(self, params: dict) -> None:
        """Goes on with other parameters of the same shapes, which are not copied.

        What the prefix cache holds is of the old ones, and is forgotten. Raises ValueError while
        requests are waiting or running, whose keys and values are of the old ones too.
        """
        if not self.idle:
            raise ValueError("expected no waiting or running request: finish or cancel them first")
        self.prefixes.evict(self.prefixes.num_held)
        self.params = params

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
        """Enqueues one forward over the planned tokens, then reads what the one before has given.

        A step may have nothing to enqueue, or, as the first, nothing to read.
        """
        plan = self.scheduler.plan(unread=self._flight is not None)
        flight, self._flight = self._flight, self._launch(plan) if plan else None
        self.prefixes.keep(self.scheduler.running)
        return self._land(flight) if flight else Step([], self.holdings())

    def holdings(self) -> Holdings:
        return holdings_of(self.memory, self.scheduler.running)

    def owners(self) -> Owners:
        return self.holdings().owners()

    def _launch(self, plan: Plan) -> Flight:
        """Enqueues a forward, and the choice of a token after each sequence that is all fed."""
        tokens, query_lens, max_query_len = self._pack(plan)
        pools, fed = self.memory.arrays(), {id(sequence) for sequence, _ in plan}
        for sequence, length in plan:
            sequence.num_cached += length
        holdings = self.holdings()
        draws = [draw for group in self.scheduler.running for draw in self._draw(group, fed)]
        sources = np.arange(self.limits.max_seqs, dtype=np.int32)
        sources[[draw.row for draw in draws]] = [draw.source for draw in draws]
        last = self._flight.drawn.tokens if self._flight else np.zeros_like(sources)
        logits, self.memory.caches = next_logits(
            self.params,
            self.model,
            tokens,
            last,
            self.memory.caches,
            pools,
            query_lens,
            sources,
            max_query_len,
            self.backend,
            self.batch_invariant,
        )
        return Flight(enqueue(logits, draws), logits, holdings)

    def _draw(self, group: Group, fed: set[int]) -> list[Draw]:
        ready = [s for s in group.sequences if id(s) in fed and not group.num_pending(s)]
        return group.request.decoding.draw(self._turn(group), ready)

    def _turn(self, group: Group) -> Turn:
        return Turn(group, self.memory, self.model.stop_tokens)

    def _pack(self, plan: Plan) -> tuple[np.ndarray, np.ndarray, int]:
        """(tokens, query_lens, max_query_len) of a plan, tokens in row order, padded to a shape."""
        limits = self.limits
        decoding = not self.batch_invariant and all(length == 1 for _, length in plan)
        query_lens = np.zeros(limits.max_seqs, np.int32)
        tokens = np.zeros(limits.max_seqs if decoding else limits.token_budget, np.int32)
        start = 0
        for sequence, length in sorted(plan, key=lambda step: step[0].row):
            query_lens[sequence.row] = length
            new = sequence.tokens[sequence.num_cached : sequence.num_cached + length]
            tokens[start : start + length] = new
            start += length
        return tokens, query_lens, 1 if decoding else limits.max_query_len

    def _land(self, flight: Flight) -> Step:
        """Reads a forward's tokens, and gives them to the requests that are still there."""
        by_group: dict[int, tuple[Group, list[tuple[Sequence, Found]]]] = {}
        rows: dict[int, list[int]] = {}
        for draw, found in zip(flight.drawn.draws, flight.drawn.read(), strict=True):
            if draw.sequence.row != NO_ROW:  # else it has ended, or was cancelled
                group = draw.group
                by_group.setdefault(id(group), (group, []))[1].append((draw.sequence, found))
                rows.setdefault(group.request.id, []).append(draw.row)
        streamed = []
        for group, found in by_group.values():
            streamed += self._read(group, found)
        return Step(streamed, flight.holdings, flight.logits, rows)

    def _read(self, group: Group, found: list[tuple[Sequence, Found]]) -> list[Streamed]:
        """Gives a group what was found; retires it when it is done."""
        if any(new.token == NO_TOKEN for _, new in found):
            return self._fail(group)
        streamed = group.request.decoding.read(self._turn(group), found)
        if not group.sequences:
            self.scheduler.retire(group)
            self.completions[group.request.id] = group.completions()
        return streamed

    def _fail(self, group: Group) -> list[Streamed]:
        """Ends all that is left of a request."""
        samples = [sequence.sample for sequence in group.sequences]
        self.scheduler.retire(group)
        end = Streamed(group.request.id, NO_TOKEN, final=True, reason="error")
        return [end._replace(sample=sample) for sample in samples]
