"""Decides which sequences run in a step: first come, first served; the last to come is preempted.

A request is admitted when its prompt fits, and takes further blocks as its tokens come. When blocks
run out, those that only the prefix cache holds are freed first; then the youngest request is
preempted. So the oldest request always goes on, and every request that fits into the pool by
itself is finished some day.
"""

from collections import deque

from pagedattn import OutOfBlocksError
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.blocks.memory import Memory
from pagedattn_serving.blocks.pools import Blocks
from pagedattn_serving.decoding.request import NO_ROW, Group, Request, Sequence
from pagedattn_serving.engine.preemption import Preemption
from pagedattn_serving.engine.prefix_cache import PrefixCache

Plan = list[tuple[Sequence, int]]  # sequences of a step, and how many tokens each brings


class Scheduler:
    """`submit` requests, `plan` each step, `retire` what is finished."""

    def __init__(self, memory: Memory, prefixes: PrefixCache, preemption: Preemption):
        self.memory, self.prefixes, self.preemption = memory, prefixes, preemption
        self.waiting: deque[Group] = deque()
        self.running: list[Group] = []  # oldest first; all are older than the waiting ones
        self.num_preemptions = 0

    @property
    def limits(self) -> Limits:
        return self.memory.limits

    def submit(self, request: Request) -> None:
        """Queues a request; ValueError if it could never run, or if its id is in use."""
        limits, width = self.limits, request.decoding.width
        if not request.prompt or request.max_new_tokens < 1:
            raise ValueError(f"request {request.id} needs a prompt and max_new_tokens >= 1")
        if any(group.request.id == request.id for group in [*self.waiting, *self.running]):
            raise ValueError(f"request {request.id} is waiting or running already")
        if width > limits.max_seqs:
            raise ValueError(
                f"request {request.id} wants {width} sequences; at most {limits.max_seqs} run"
            )
        fit = self.memory.longest(width)
        if request.max_cached > fit:
            raise ValueError(
                f"request {request.id} may come to {request.max_cached} tokens; at most {fit} fit"
            )
        self.waiting.append(Group(request, [Sequence(list(request.prompt))]))

    def plan(self, unread: bool = False) -> Plan:
        """The sequences of the next step, each with how many of its pending tokens it brings.

        Decodes come first, so that no prompt delays them; chunks of prompts get the rest of the
        budget. The pool has blocks for all these tokens when this returns.

        Args:
          unread: whether the host has tokens to read that the device chose. Then nobody is
            preempted, and the plan is empty instead: a sequence that has ended may make room.
        """
        self._admit()
        while plan := self._within_budget():
            failed = self.memory.grow({s.row: length for s, length in plan})
            if not any(failed):
                return plan
            # A block a row at least, so that not every step has to look for some.
            lacking = [
                sum(self._lacking(blocks, s, n) for s, n in plan if s.row in rows)
                for blocks, rows in zip(self.memory.pools, failed, strict=True)
            ]
            if not self.prefixes.evict([max(n, self.limits.max_seqs) if n else 0 for n in lacking]):
                if unread:
                    return []
                self._preempt_youngest()
        return []

    def retire(self, group: Group) -> None:
        """Frees the rows and blocks of a running group; what it has in flight will not be read."""
        self.memory.release(group.rows)
        self._leave(group)
        for sequence in group.sequences:
            sequence.row = NO_ROW

    def cancel(self, request_id: int) -> bool:
        """Forgets a request wherever it is; whether it was waiting or running."""
        for group in self.running:
            if group.request.id == request_id:
                self.retire(group)
                return True
        for group in self.waiting:
            if group.request.id == request_id:
                self.preemption.forget(group)
                self.waiting.remove(group)
                return True
        return False

    def _within_budget(self) -> Plan:
        plan, budget = [], self.limits.token_budget
        pending = [(s, g.num_pending(s)) for g in self.running for s in g.sequences]
        for sequence, count in sorted(pending, key=lambda each: each[1] > 1):
            if length := min(count, self.limits.max_query_len, budget):
                plan.append((sequence, length))
                budget -= length
        return plan

    def _preempt_youngest(self) -> None:
        if len(self.running) == 1:  # cannot happen: submit() refuses such requests
            raise OutOfBlocksError("one request alone finds no blocks in the pool")
        group = self.running[-1]
        self.num_preemptions += 1
        rows = group.rows
        self.preemption.suspend(group)
        group.spare_rows += rows
        self._leave(group)
        self.waiting.appendleft(group)

    def _leave(self, group: Group) -> None:
        """Takes a group off the running ones: frees its rows, and marks its blocks as just used."""
        for sequence in [*group.sequences, *group.finished]:
            self.prefixes.touch(sequence)
        self.running.remove(group)
        self.memory.free_rows += {*group.spare_rows, *group.rows}
        group.spare_rows = []

    def _admit(self) -> None:
        """Admits waiting groups in order: small requests must not overtake a large one for ever."""
        while self.waiting and self._fits(self.waiting[0]):
            group = self.waiting.popleft()
            self.running.append(group)
            group.spare_rows = [
                self.memory.free_rows.pop() for _ in range(group.request.decoding.width)
            ]
            for sequence in group.sequences:
                sequence.row = group.spare_rows.pop()
                if not self.preemption.resume(sequence):
                    self.prefixes.start(sequence)

    def _fits(self, group: Group) -> bool:
        """Whether a group finds rows, and blocks for its tokens and one more in each sequence."""
        if len(self.memory.free_rows) < group.request.decoding.width:
            return False
        missing = [max(self._missing(blocks, group), 0) for blocks in self.memory.pools]
        found = self.prefixes.num_evictable()
        if self.running and any(m > n for m, n in zip(missing, found, strict=True)):
            return False
        if any(sequence.host_row != NO_ROW for sequence in group.sequences):
            self.prefixes.evict(missing)  # blocks come back before `plan` would make room
        return True

    def _missing(self, blocks: Blocks, group: Group) -> int:
        """How many free blocks a pool lacks for a waiting group beside the running ones."""
        needed = sum(self._lacking(blocks, s, group.num_pending(s) + 1) for s in group.sequences)
        swapped = sum(blocks.most(s.num_cached) for s in group.sequences if s.host_row != NO_ROW)
        promised = sum(
            self._lacking(blocks, s, g.num_pending(s)) for g in self.running for s in g.sequences
        )
        return needed + swapped + promised - blocks.num_free

    def _lacking(self, blocks: Blocks, sequence: Sequence, length: int) -> int:
        """Blocks that a sequence lacks for its next tokens; at least 1, to copy a shared one."""
        owned = blocks.most(sequence.num_cached)
        return max(blocks.most(sequence.num_cached + length) - owned, 1)
