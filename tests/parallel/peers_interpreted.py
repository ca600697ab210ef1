"""The kernels of serving/peer_kernel.py on a CPU, by Triton's interpreter: one device at a time.

Both devices' memories are at hand before a device runs, and in its own the peer's rows are already
there. What it pushes is what the other one then finds: no threads, and both sides are tested.
Triton decides at its import whether it interprets, so `test_peers` runs this file in a process of
its own: `TRITON_INTERPRET=1 python tests/parallel/peers_interpreted.py`.
"""

import numpy as np
import torch
from serving import peer_kernel
from triton import knobs

assert knobs.runtime.interpret, "set TRITON_INTERPRET=1"

ROWS, NUM_ROWS, COLUMNS, PADDED = 8, 3, 24, 32
ROW_BYTES = 4 * COLUMNS
EPS = 1e-5
SIZES = {"PARTS": 2, "COLUMNS": COLUMNS, "PADDED": PADDED, "ROWS": ROWS, "ROW_BYTES": ROW_BYTES}


class Device:
    """A memory, laid out as peer_kernel.py says; nothing in it is right but its counts."""

    def __init__(self, epoch: int, dtype: torch.dtype):
        self.counts = np.full(2 * ROWS, epoch, np.int32)
        self.memory = np.full(8 * ROWS + 2 * ROWS * ROW_BYTES, 255, np.uint8)
        self.memory[: 8 * ROWS] = self.counts.view(np.uint8)
        self.flags, self.epochs = self.memory[: 8 * ROWS].view(np.int32).reshape(2, ROWS)
        self.dtype = dtype

    def halves(self) -> torch.Tensor:
        rows = self.memory[8 * ROWS :].reshape(2, ROWS, ROW_BYTES)
        bits = torch.from_numpy(rows).view(self.dtype)
        return bits[:, :, :COLUMNS]

    def receive(self, rows: torch.Tensor, epoch: int) -> None:
        self.halves()[epoch & 1, :NUM_ROWS] = rows
        self.flags[:NUM_ROWS] = epoch


def run(name: str, device: Device, peer: Device, part, *others):
    terms = torch.stack([0.25 * part.float(), 0.75 * part.float()])
    both = [each.memory.ctypes.data for each in (device, peer)]
    addresses = torch.from_numpy(np.array(both, np.uint64).view(np.int32))
    outs = [torch.full_like(part, torch.nan) for _ in range(1 + (name == "norm_kernel"))]
    constants = SIZES | ({"EPS": EPS} if others else {})
    memory = torch.zeros(1, dtype=torch.int32)
    getattr(peer_kernel, name)[(NUM_ROWS,)](terms, *others, addresses, memory, *outs, **constants)
    return outs


def check(name: str, dtype: torch.dtype, epoch: int) -> None:
    """Epoch `epoch`, of which the second device's rows are there before the first one runs."""
    random = torch.Generator().manual_seed(abs(epoch))
    one, two, residual = torch.randn(3, NUM_ROWS, COLUMNS, generator=random).to(dtype)
    scale = torch.randn(COLUMNS, generator=random).to(dtype)
    others = (residual, scale) if name == "norm_kernel" else ()
    before = int(np.int32(epoch - 1)) if epoch > -(2**31) else 2**31 - 1
    first, second = Device(before, dtype), Device(before, dtype)
    first.receive(two, epoch)
    results = [run(name, first, second, one, *others), run(name, second, first, two, *others)]
    total = (one.float() + two.float()).to(dtype)
    want = [total]
    if others:
        total = (residual.float() + total.float()).to(dtype)
        wide = total.float()
        mean = (wide * wide).mean(1, keepdim=True)
        want = [total, (scale.float() * (wide * torch.rsqrt(mean + EPS))).to(dtype)]
    for outs in results:
        assert torch.equal(outs[0], want[0]), (name, dtype, epoch)
        torch.testing.assert_close(outs[-1], want[-1])
    for device in (first, second):
        assert (device.flags[:NUM_ROWS] == epoch).all()
        assert (device.epochs[:NUM_ROWS] == epoch).all()
        assert (device.flags[NUM_ROWS:] == before).all()
    assert torch.equal(second.halves()[epoch & 1, :NUM_ROWS], one)
    others = second.halves()[1 - (epoch & 1)], second.halves()[:, NUM_ROWS:]
    assert all((rows.view(torch.uint8) == 255).all() for rows in others)


if __name__ == "__main__":
    for name in ("sum_kernel", "norm_kernel"):
        for dtype in (torch.float32, torch.float16):  # to bfloat16 the interpreter does not round
            for epoch in (1, -(2**31)):  # the second where numbers wrap
                check(name, dtype, epoch)
    print("as expected")
