"""GPUs that are not here: what one program may take of each, and what programs take of it."""

import re
import subprocess
import tempfile
from typing import NamedTuple

import pytest

pytest.importorskip("triton", minversion="3.5")
from triton import knobs


class Gpu(NamedTuple):
    """A GPU, and of its compute capability what CUDA's programming guide says."""

    capability: tuple[int, int]
    num_sms: int
    kilobytes: int  # KiB of shared memory that a program can have

    @property
    def tensor_columns(self) -> int:
        """Columns of tensor memory."""
        return 512 if self.capability[0] == 10 else 0


GPUS = {
    "A100": Gpu((8, 0), 108, 163),
    "A10": Gpu((8, 6), 72, 99),
    "L4": Gpu((8, 9), 58, 99),
    "H200": Gpu((9, 0), 132, 227),
    "B200": Gpu((10, 0), 148, 227),
    "RTX 5090": Gpu((12, 0), 170, 99),
}
RESERVED = 1024  # bytes of shared memory that CUDA keeps from 9.0 on, beside those KiB
REGISTERS = 1 << 16  # of all threads of a program
A_THREAD = 255  # of them


class Taken(NamedTuple):
    """What a compiled program takes."""

    shared: int  # bytes of shared memory
    columns: int  # of tensor memory
    registers: int  # of a thread
    threads: int
    spilled: int  # bytes of a thread's memory, for what found no register


def taken(program) -> Taken:
    """What a program takes that Triton has compiled: by what it and CUDA's tools say of it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = re.findall(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", printed)
    ((registers, stack, static, local),) = [map(int, numbers) for numbers in found]
    return Taken(
        shared=program.metadata.shared + max(0, static - RESERVED),
        columns=program.metadata.tmem_size,
        registers=registers,
        threads=32 * program.metadata.num_warps,
        spilled=stack + local,
    )
