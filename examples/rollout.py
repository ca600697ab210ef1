"""Reinforcement learning whose sampler and trainer agree in every bit (GRPO, Flax NNX, optax).

    python examples/rollout.py

The engine samples from the policy's own arrays, so an update copies no weights, and the trainer's
log-probabilities are the sampler's. The policy learns to write rising tokens. Exit status 1: a
log-probability differs in a bit, a weight was copied or moved, or the policy has not learnt.
"""

import sys
import time

import jax
import numpy as np
import optax
from flax import nnx
from grpo.objective import advantages, logprobs, update
from grpo.policy import MODEL, Policy, pointers
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import Sampling
from pagedattn_serving.engine.engine import Engine

PROMPTS, SAMPLES, NEW = tuple(range(8)), 8, 8  # prompts of a token, samples of each, their tokens
ROWS = 32  # tokens a forward pass
LIMITS = Limits(64, block_size=16, max_seq_len=16, max_seqs=ROWS, token_budget=ROWS)


def sample(engine: Engine, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with what the engine continues them by, and the log-probability of each new token."""
    how = [Sampling(1.0, SAMPLES, seed=seed * len(PROMPTS) + p, logprobs=0) for p in PROMPTS]
    asked = [Request(p, (p,), NEW, how[p]) for p in PROMPTS]
    streamed = sorted(engine.stream(asked), key=lambda token: (token.request, token.sample))
    new = np.array([token.token for token in streamed], np.int32).reshape(-1, NEW)
    scores = np.array([token.logprob for token in streamed], np.float32).reshape(-1, NEW)
    return np.column_stack([np.repeat(np.array(PROMPTS, np.int32), SAMPLES), new]), scores


def difference_without(params: dict) -> float:
    """Of the log-probabilities without the mode: a trainer takes all tokens in one pass."""
    tokens, sampled = sample(Engine(params, MODEL, LIMITS), seed=0)
    scored = logprobs(params, MODEL, tokens, NEW * len(tokens), batch_invariant=False)
    return float(np.abs(scored - sampled).max())


def main(updates: int = 100) -> int:
    policy = Policy(MODEL, jax.random.key(0))
    optimizer = nnx.Optimizer(policy, optax.adam(3e-3), wrt=nnx.Param)
    engine = Engine(policy.arrays, MODEL, LIMITS, batch_invariant=True)
    before, rewards, differences, times = pointers(engine.params), [], [], []
    for number in range(updates):
        tokens, sampled = sample(engine, number)
        reward = (np.diff(tokens) > 0).mean(axis=1)  # the share of neighbours that rise
        gains = advantages(reward.reshape(-1, SAMPLES))
        scored = logprobs(policy.arrays, MODEL, tokens, ROWS, batch_invariant=True)
        differences.append(float(np.abs(scored - sampled).max()))
        update(policy, optimizer, MODEL, tokens, sampled, scored, gains, ROWS)
        engine.update_weights(policy.arrays)
        rewards.append(reward.mean())
        times.append(time.perf_counter())
        if number % 20 == 0 or number == updates - 1:
            print(f"update {number}: reward {rewards[-1]:.3f}", flush=True)
    speed = sampled.size / np.diff(times).mean()  # without the first update, which compiles
    in_place = pointers(engine.params) == pointers(policy.arrays) == before
    print(f"one memory for engine and trainer, 0 bytes copied: {in_place}")
    print(f"largest difference of log-probabilities: {max(differences)} batch-invariant, ", end="")
    print(f"{difference_without(engine.params):.2g} without; {speed:.0f} tokens/s with updates")
    return 0 if in_place and max(differences) == 0 and rewards[-1] > rewards[0] else 1


if __name__ == "__main__":
    sys.exit(main())
