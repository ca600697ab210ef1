"""Requests that arrive at random, and what their users see of an engine under such a load."""

import time
from dataclasses import dataclass, field

import numpy as np
from serving.engine import Engine
from serving.request import Request
from serving.sampling import GREEDY


@dataclass(frozen=True)
class Load:
    """Poisson arrivals of prompts of random tokens, their lengths spread evenly.

    Fields:
      rate: requests a second.
      seconds: how long they arrive.
      shortest, longest: tokens of a prompt.
      new_tokens: tokens that each asks for.
    """

    rate: float
    seconds: float
    shortest: int
    longest: int
    new_tokens: int

    def arrivals(self, vocab_size: int, first_id: int) -> list[tuple[float, Request]]:
        """When each request comes, in seconds from the start."""
        rng = np.random.default_rng(first_id)
        count = max(1, round(self.rate * self.seconds))
        times = np.cumsum(rng.exponential(1 / self.rate, count)).tolist()
        lengths = rng.integers(self.shortest, self.longest, count, endpoint=True)
        prompts = [tuple(rng.integers(vocab_size, size=n).tolist()) for n in lengths]
        return [
            (when, Request(first_id + i, prompt, self.new_tokens, GREEDY))
            for i, (when, prompt) in enumerate(zip(times, prompts, strict=True))
        ]


@dataclass
class Seen:
    """What the users of a load saw.

    Fields:
      asked: when each request was sent; seconds since the start.
      came: when each of its tokens came.
      running: how many requests were running at each step.
    """

    asked: dict[int, float] = field(default_factory=dict)
    came: dict[int, list[float]] = field(default_factory=dict)
    running: list[int] = field(default_factory=list)

    def figures(self) -> dict[str, float]:
        """Tokens a second from the first request to the last token, and latencies in ms."""
        times = list(self.came.values())
        first = [each[0] - self.asked[i] for i, each in self.came.items()]
        between = np.concatenate([np.diff(each) for each in times])
        seconds = max(each[-1] for each in times) - min(self.asked.values())
        return {
            "requests": len(times),
            "running": float(np.mean(self.running)),
            "tokens_s": sum(map(len, times)) / seconds,
            "first_p50_ms": 1e3 * float(np.percentile(first, 50)),
            "first_p99_ms": 1e3 * float(np.percentile(first, 99)),
            "between_p50_ms": 1e3 * float(np.percentile(between, 50)),
            "between_p99_ms": 1e3 * float(np.percentile(between, 99)),
        }


def serve(engine: Engine, arrivals: list[tuple[float, Request]]) -> Seen:
    """Runs the engine while the requests arrive, to the end of the last."""
    seen, waiting, start = Seen(), arrivals[::-1], time.perf_counter()
    while waiting or not engine.idle:
        now = time.perf_counter() - start
        while waiting and waiting[-1][0] <= now:
            when, request = waiting.pop()
            engine.submit(request)
            seen.asked[request.id] = when
        if engine.idle:
            time.sleep(max(0.0, waiting[-1][0] - now))
            continue
        tokens = engine.step().tokens
        now = time.perf_counter() - start
        seen.running.append(len(engine.scheduler.running))
        for token in tokens:
            seen.came.setdefault(token.request, []).append(now)
    return seen


def all_running(engine: Engine, prompts: list[tuple[int, ...]], steps: int, first_id: int) -> float:
    """Seconds a step while all prompts, and nothing else, are being decoded."""
    longest = max(map(len, prompts))
    room = engine.limits.max_seq_len - longest
    for index, prompt in enumerate(prompts):
        engine.submit(Request(first_id + index, prompt, room, GREEDY))
    while decoded(engine) < len(prompts):
        engine.step()
    engine.step()
    start = time.perf_counter()
    count = sum(len(engine.step().tokens) for _ in range(steps))
    seconds = time.perf_counter() - start
    for index in range(len(prompts)):
        engine.cancel(first_id + index)
    if count != steps * len(prompts):
        raise RuntimeError(f"expected {len(prompts)} tokens a step: raise max_seq_len, {room} left")
    return seconds / steps


def decoded(engine: Engine) -> int:
    """How many of the running requests have got a token."""
    groups = engine.scheduler.running
    return sum(bool(group.completion(group.sequences[0])) for group in groups)
