"""The kernels of parallel/peer_kernel.py on a CPU, by Triton's interpreter: one device at a time.

Both devices' memories are at hand before a device runs, and in its own the peer's rows are already
there. What it pushes is what the other one then finds: no threads, and both sides are tested.
Triton decides at its import whether it interprets, so `test_peers` runs this file in a process of
its own: `TRITON_INTERPRET=1 python tests/parallel/peers_interpreted.py`.
"""

import numpy as np
import torch
from pagedattn_serving.parallel import peer_kernel
from pagedattn_serving.parallel.all_reduce import EMPTY, TURNS
from triton import knobs

assert knobs.runtime.interpret, "set TRITON_INTERPRET=1"

ROWS, NUM_ROWS, COLUMNS, PADDED = 8, 3, 24, 32
WORDS = 28  # of which a row of float32 uses 24
JUNK = 7
EPS = 1e-5
SIZES = {"PARTS": 2, "COLUMNS": COLUMNS, "PADDED": PADDED}
SIZES |= {"ROWS": ROWS, "WORDS": WORDS, "EMPTY": EMPTY}


class Device:
    """A memory, laid out as peer_kernel.py says, before the rows of a turn are exchanged."""

    def __init__(self, turn: int, dtype: torch.dtype):
        self.memory = np.full(ROWS + TURNS * ROWS * WORDS, JUNK, np.int32)
        self.turns = self.memory[:ROWS]
        self.rows = self.memory[ROWS:].reshape(TURNS, ROWS, WORDS)
        self.turns[:] = (turn - 1) % TURNS
        self.rows[turn] = EMPTY
        self.received = torch.from_numpy(self.rows).view(dtype)[turn, :NUM_ROWS, :COLUMNS]


def run(name: str, device: Device, peer: Device, part, *others):
    terms = torch.stack([0.25 * part.float(), 0.75 * part.float()])
    both = [each.memory.ctypes.data for each in (device, peer)]
    addresses = torch.from_numpy(np.array(both, np.uint64).view(np.int32))
    outs = [torch.full_like(part, torch.nan) for _ in range(1 + (name == "norm_kernel"))]
    constants = SIZES | ({"EPS": EPS} if others else {})
    memory = torch.zeros(1, dtype=torch.int32)
    getattr(peer_kernel, name)[(NUM_ROWS,)](terms, *others, addresses, memory, *outs, **constants)
    return outs


def check(name: str, dtype: torch.dtype, turn: int) -> None:
    """A turn of which the second device's rows are there before the first one runs."""
    random = torch.Generator().manual_seed(turn)
    one, two, residual = torch.randn(3, NUM_ROWS, COLUMNS, generator=random).to(dtype)
    one[0, 1], one[2, 3], two[0, 1] = as_empty(dtype), -0.0, 0.0
    scale = torch.randn(COLUMNS, generator=random).to(dtype)
    others = (residual, scale) if name == "norm_kernel" else ()
    first, second = Device(turn, dtype), Device(turn, dtype)
    first.received[:] = two
    results = [run(name, first, second, one, *others), run(name, second, first, two, *others)]
    total = (one.float() + two.float()).to(dtype)
    want = [total]
    if others:
        total = (residual.float() + total.float()).to(dtype)
        wide = total.float()
        mean = (wide * wide).mean(1, keepdim=True)
        want = [total, (scale.float() * (wide * torch.rsqrt(mean + EPS))).to(dtype)]
    for outs in results:
        torch.testing.assert_close(outs[0], want[0], rtol=0, atol=1e-38)
        torch.testing.assert_close(outs[-1], want[-1])
    torch.testing.assert_close(second.received, one, rtol=0, atol=1e-38)
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    assert (second.received.contiguous().view(bits) != as_empty(dtype).view(bits)).all()
    before, last = (turn - 1) % TURNS, (turn + 1) % TURNS
    for device in (first, second):
        assert (device.turns[:NUM_ROWS] == turn).all()
        assert (device.turns[NUM_ROWS:] == before).all()
        assert (device.rows[before, :NUM_ROWS] == EMPTY).all()
        assert (device.rows[turn, NUM_ROWS:] == EMPTY).all()
        assert (device.rows[before, NUM_ROWS:] == JUNK).all()
        assert (device.rows[last] == JUNK).all()


def as_empty(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([EMPTY], dtype=torch.int32).view(dtype)[0]


if __name__ == "__main__":
    for name in ("sum_kernel", "norm_kernel"):
        for dtype in (torch.float32, torch.float16):  # to bfloat16 the interpreter does not round
            for turn in range(TURNS):
                check(name, dtype, turn)
    print("as expected")
