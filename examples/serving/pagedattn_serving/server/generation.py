"""From a checked request to the engine's requests, and from their tokens to pieces of answers."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.blocks.pool_size import longest
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import Sampling
from pagedattn_serving.server.refusal import Refusal, invalid
from pagedattn_serving.server.request_schema import Parameters
from pagedattn_serving.server.response import Piece, Sample
from pagedattn_serving.server.text import Text
from pagedattn_serving.server.tickets import Engines, Ticket

SEEDS = 1 << 31  # the engine's seeds are smaller
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class Served:
    """The model that is served: its name, its text, and what fits into its engine."""

    name: str
    text: Text
    vocab_size: int
    limits: Limits
    windows: tuple[int | None, ...] = ()  # of the layers, if any has one

    def longest(self, width: int) -> int:
        """Tokens of a prompt and its answer together, the last of which is never cached."""
        return longest(self.limits, self.windows, width) + 1

    def require(self, model: str) -> None:
        """Refusal unless this is the model."""
        if model != self.name:
            text = f"there is no model {model[:80]!r} here, only {self.name!r}"
            raise Refusal(404, text, "model", "model_not_found")


class Generation:
    """An accepted request under way.

    Fields:
      prompts: its prompts as tokens.
      num_tokens: how many tokens were generated so far, for all samples.
      reasons: why samples ended, of those that have.
    """

    def __init__(self, served: Served, parameters: Parameters, requests: list[Request], tickets):
        self.text, self.parameters = served.text, parameters
        self.prompts = [request.prompt for request in requests]
        self.tickets: list[Ticket] = tickets
        self.num_tokens, self.reasons = 0, []

    @property
    def usage(self) -> dict:
        prompt = sum(len(prompt) for prompt in self.prompts)
        total = prompt + self.num_tokens
        parts = {"prompt_tokens": prompt, "completion_tokens": self.num_tokens}
        return parts | {"total_tokens": total}

    def close(self) -> None:
        for ticket in self.tickets:
            ticket.close()

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all choices as they come; Refusal if a request cannot be finished."""
        arrived: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()
        readers = [asyncio.create_task(self._read(i, arrived)) for i in range(len(self.tickets))]
        try:
            for _ in readers:
                while (piece := await arrived.get()) is not None:
                    if isinstance(piece, BaseException):
                        raise piece
                    yield piece
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.gather(*readers, return_exceptions=True)

    async def _read(self, index: int, arrived: asyncio.Queue) -> None:
        try:
            async with aclosing(self._of_ticket(index)) as pieces:
                async for piece in pieces:
                    arrived.put_nowait(piece)
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    async def _of_ticket(self, index: int) -> AsyncGenerator[Piece, None]:
        """Pieces of one prompt's samples; when all have ended, the engine is told."""
        parameters, ticket = self.parameters, self.tickets[index]
        parts = (
            self.text,
            self.prompts[index],
            parameters.stop,
            parameters.min_tokens,
            self._opening(index),
        )
        samples = [Sample(index * parameters.n + sample, *parts) for sample in range(parameters.n)]
        async with aclosing(ticket.tokens()) as tokens:
            async for token in tokens:
                sample = samples[token.sample]
                self.num_tokens += not sample.reason
                if piece := sample.push(token):
                    self.reasons += [piece.reason] if piece.reason else []
                    yield piece
                if all(sample.reason for sample in samples):
                    break
        ticket.close()

    def _opening(self, index: int) -> str:
        """What the answers to a prompt begin with."""
        prompt = self.parameters.prompts[index] if self.parameters.echo else ""
        return prompt if isinstance(prompt, str) else self.text.decode(prompt)


async def open_generation(served: Served, engines: Engines, parameters: Parameters) -> Generation:
    """Tokens, limits, then the engine; Refusal where one of them says no."""
    served.require(parameters.model)
    if parameters.n > served.limits.max_seqs:
        raise invalid("n", f"at most {served.limits.max_seqs} samples run at a time")
    if any(token >= served.vocab_size for token in parameters.stop_tokens):
        raise invalid("stop_token_ids", f"expected tokens from 0 to {served.vocab_size - 1}")
    if len(parameters.prompts) > engines.max_requests:
        raise invalid("prompt", f"at most {engines.max_requests} prompts are taken at a time")
    prompts = await asyncio.to_thread(_checked_tokens, served, parameters)
    sampling = _sampling(parameters)
    requests = [
        Request(0, prompt, _room(served, parameters, prompt), replace(sampling, seed=seed))
        for prompt, seed in zip(prompts, _seeds(parameters, len(prompts)), strict=True)
    ]
    return Generation(served, parameters, requests, await engines.open(requests))


def tokens_of(text: Text, parameters: Parameters) -> list[tuple[int, ...]]:
    """Every prompt as tokens; for a thread, as a long one takes a while."""
    if parameters.messages:
        return [tuple(text.chat(list(parameters.messages), parameters.begin or False))]
    begin = parameters.begin is not False
    return [
        tuple(text.encode(prompt, begin)) if isinstance(prompt, str) else prompt
        for prompt in parameters.prompts
    ]


def _checked_tokens(served: Served, parameters: Parameters) -> list[tuple[int, ...]]:
    prompts = tokens_of(served.text, parameters)
    blamed = "messages" if parameters.messages else "prompt"
    for prompt in prompts:
        if not prompt:
            raise invalid(blamed, "expected at least one token, got an empty text")
        if not all(0 <= token < served.vocab_size for token in prompt):
            raise invalid(blamed, f"expected tokens from 0 to {served.vocab_size - 1}")
    return prompts


def _room(served: Served, parameters: Parameters, prompt: tuple[int, ...]) -> int:
    """How many tokens to generate at most."""
    most = served.longest(parameters.n)
    room = most - len(prompt)
    shared = "" if parameters.n == 1 else f" with n={parameters.n}"
    if room < 1:
        blamed = "messages" if parameters.messages else "prompt"
        text = f"{len(prompt)} tokens; at most {most - 1} fit before an answer{shared}"
        raise invalid(blamed, text, TOO_LONG)
    if parameters.max_tokens is not None and parameters.max_tokens > room:
        after = f"{parameters.max_tokens} after a prompt of {len(prompt)} tokens"
        text = f"{after}; {most} fit together{shared}"
        raise invalid("max_tokens", text, TOO_LONG)
    count = parameters.max_tokens or room
    if parameters.min_tokens > count:
        raise invalid(
            "min_tokens", f"expected up to {count}, as max_tokens, got {parameters.min_tokens}"
        )
    return count


def _seeds(parameters: Parameters, count: int) -> list[int]:
    """One for each prompt: alike prompts of a request without a seed are to differ."""
    if parameters.seed is None:
        return [secrets.randbelow(SEEDS) for _ in range(count)]
    return [parameters.seed % SEEDS] * count


def _sampling(parameters: Parameters) -> Sampling:
    return Sampling(
        temperature=parameters.temperature,
        num_samples=parameters.n,
        top_k=parameters.top_k,
        top_p=parameters.top_p,
        logprobs=parameters.logprobs,
        ignore_eos=parameters.ignore_eos,
        stop_tokens=parameters.stop_tokens,
        min_tokens=parameters.min_tokens,
    )
