"""Which replica serves a prompt: the one that has its beginning cached, unless it is overloaded."""

import hashlib
from collections.abc import Mapping, Sequence

PREFIX = 64  # tokens that prompts must share to go to the same replica
IMBALANCE = 8  # requests that a replica may have more than the least loaded one


def prefix_of(prompt: Sequence[int]) -> bytes:
    """What prompts that belong together have in common."""
    return ",".join(map(str, prompt[:PREFIX])).encode()


def ranked(prefix: bytes, loads: Mapping[str, int]) -> list[str]:
    """The replicas, best first, for a prompt that begins so; `loads` are their open requests.

    Rendezvous hashing: each replica draws a number with the prefix, and the highest wins. So a
    prefix stays where it was when another replica comes or goes, and nobody keeps a table.
    """
    order = sorted(loads, key=lambda name: _draw(prefix, name), reverse=True)
    least = min(loads.values(), default=0)
    return sorted(order, key=lambda name: loads[name] - least > IMBALANCE)


def _draw(prefix: bytes, name: str) -> bytes:
    return hashlib.blake2b(prefix, key=name.encode()[-64:], digest_size=8).digest()
