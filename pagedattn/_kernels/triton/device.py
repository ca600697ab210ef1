"""What launches depend on of a GPU."""

from typing import NamedTuple

# KiB of shared memory that one program can have, by compute capability; others have 99.
SHARED_KILOBYTES = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}
# The instructions for products of matrices, by the first number of the compute capability; others
# have mma. It reads queries from registers, the others from shared memory.
PRODUCTS = {9: "wgmma", 10: "tcgen05"}


class Device(NamedTuple):
    """The limits of a device that launches depend on."""

    num_sms: int
    shared_bytes: int
    products: str  # by which instructions: mma, wgmma or tcgen05


def device_of(num_sms: int, capability: tuple[int, int]) -> Device:
    """The limits of a device, by its number of multiprocessors and its compute capability."""
    kilobytes = SHARED_KILOBYTES.get(capability[0] * 10 + capability[1], 99)
    return Device(num_sms, kilobytes << 10, PRODUCTS.get(capability[0], "mma"))
