"""Who does what in a program over latents of eight bits, and with how many registers."""

from typing import NamedTuple

from ..kernel_config import KernelConfig

HALVES = 2  # of the values: a warpgroup for each
MOST_ROWS = 16  # for which two warpgroups of the keys have registers enough


class Registers(NamedTuple):
    """Of a thread: in all at most as many as the program begins with, the same for each."""

    keys: int
    values: int
    loads: int


def turns(config: KernelConfig) -> int:
    """How many warpgroups weigh keys, a step each in turn."""
    return 2 if config.rows <= MOST_ROWS else 1


def registers(config: KernelConfig) -> Registers:
    return Registers(104, 120, 24) if turns(config) == 2 else Registers(176, 144, 40)
