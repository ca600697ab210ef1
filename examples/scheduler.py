"""Who runs in a step, and in which blocks: requests, and the host's side of a bounded pool.

A request's worst case is reserved when it is admitted, but its blocks are taken only as its tokens
come. So a running request never waits for a block, and none is ever evicted.
"""

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Int

FREE = -1  # the owner of a block that nobody owns


@dataclass(frozen=True)
class Limits:
    """Sizes of the pool and of a step; the shapes of all arrays follow from these alone."""

    num_blocks: int = 64
    block_size: int = 16
    max_seq_len: int = 512  # tokens of one request in the cache
    max_seqs: int = 8  # requests that run at a time
    token_budget: int = 64  # tokens a step
    max_query_len: int = 32  # tokens of one prompt a step

    def __post_init__(self):
        if self.token_budget < self.max_seqs:
            raise ValueError(
                f"token_budget must reach max_seqs, {self.max_seqs}, so that all may decode in one "
                f"step; got {self.token_budget}"
            )

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class Request:
    """A prompt to continue; the id is the caller's, from 0 up, and unique."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int

    @property
    def max_cached(self) -> int:
        """The worst case: all but the last token, which is never fed back."""
        return len(self.prompt) + self.max_new_tokens - 1


@dataclass
class Sequence:
    """A running request: its tokens, how many of them the cache holds, and where."""

    request: Request
    tokens: list[int]
    num_cached: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        return len(self.tokens) - self.num_cached

    @property
    def completion(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]


class Scheduler:
    """`submit` requests, `plan` each step, `release` what is finished."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Sequence] = []
        self.free = deque(range(limits.num_blocks))
        self.owners: Int[np.ndarray, " num_blocks"] = np.full(limits.num_blocks, FREE)

    @property
    def num_reserved(self) -> int:
        """Blocks promised to the running requests, taken or not."""
        return sum(self._worst_case(sequence.request) for sequence in self.running)

    def submit(self, request: Request) -> None:
        """Queues a request; ValueError if it could never run."""
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(f"request {request.id} needs a prompt and max_new_tokens >= 1")
        limit = min(self.limits.max_seq_len, self.limits.num_blocks * self.limits.block_size)
        if request.max_cached > limit:
            raise ValueError(
                f"request {request.id} may come to {request.max_cached} tokens; at most {limit} fit"
            )
        self.waiting.append(request)

    def plan(self) -> list[tuple[Sequence, int]]:
        """The sequences of the next step, each with how many of its pending tokens it brings.

        Decoding ones come first, so that no prompt delays them; chunks of prompts get the rest.
        Their blocks are theirs on return.
        """
        self._admit()
        steps, budget = [], self.limits.token_budget
        for sequence in sorted(self.running, key=lambda sequence: sequence.num_pending > 1):
            if length := min(sequence.num_pending, self.limits.max_query_len, budget):
                self._grow(sequence, sequence.num_cached + length)
                steps.append((sequence, length))
                budget -= length
        return steps

    def release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.free.extend(sequence.blocks)
        self.owners[sequence.blocks] = FREE

    def _admit(self) -> None:
        """First come, first served: small requests do not overtake a large one for ever."""
        while self.waiting and len(self.running) < self.limits.max_seqs:
            if self.num_reserved + self._worst_case(self.waiting[0]) > self.limits.num_blocks:
                return
            request = self.waiting.popleft()
            self.running.append(Sequence(request, list(request.prompt)))

    def _worst_case(self, request: Request) -> int:
        return self.limits.blocks_for(request.max_cached)

    def _grow(self, sequence: Sequence, num_tokens: int) -> None:
        while len(sequence.blocks) < self.limits.blocks_for(num_tokens):
            block = self.free.popleft()
            self.owners[block] = sequence.request.id
            sequence.blocks.append(block)
