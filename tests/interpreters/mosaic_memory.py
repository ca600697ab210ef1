"""Memory as Mosaic's programs share it, for JAX's GPU interpreter: unions of refs, and races.

What JAX 0.12 has instead is written up in docs/contributing/jax-interpreter.md.
"""

from collections.abc import Sequence

import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import race_detection_state as races
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as host
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState

GMEM = memory.get_memory_space_idx(gpu_core.MemorySpace.GMEM)
REGS = memory.get_memory_space_idx(gpu_core.MemorySpace.REGS)


class Races(GPURaceDetectionState):
    """Accesses of the members of a union are those of its first member.

    The members of a `RefUnion` are views of the same memory, as on the GPU: a matrix in tiles of 8
    rows by the columns of the swizzle, those tiles, and the matrix with numbers of another type.
    JAX gives each memory of its own, calls any two members a race, and refuses to read by one what
    was written by another, as our loads of single rows do.
    """

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.tiles = {}  # of a member: the first member, and the rows and columns of a tile

    def in_matrix(self, key, access):
        """The first member of the union, and the access as one of it."""
        first, sizes = self.tiles.get(key, (key, None))
        return first, merged(access, sizes) if sizes else access

    def check_read(self, thread, clock, key, access, source_info=None):
        super().check_read(thread, clock, *self.in_matrix(key, access), source_info)

    def check_write(self, thread, clock, key, access, source_info=None):
        """Results may be written twice, by programs that compute the same: `SharedResults` looks.

        They must still not be written where another program may be reading.
        """
        if key.memory_space_id != GMEM:
            super().check_write(thread, clock, *self.in_matrix(key, access), source_info)
            return
        line = source_info_util.summarize(source_info) if source_info else "pallas_call"
        with self.lock:
            self.writes[key].append((thread, clock, access.range, line))
            reads = [*self.reads[key]]
        for other, read_clock, read, read_line in reads:
            if not read_clock.ordered(clock) and races._ranges_overlap(access.range, read):
                raise RuntimeError(
                    f"RACE DETECTED\n  write of {key}[{access}] from {thread}, {line}\n"
                    f"  read of {key}[{read}] from {other}, {read_line}"
                )


def merged(access, sizes: Sequence[int]):
    """An access of tiles `[..., units, pieces, rows, columns]` as one of the matrix."""
    *lead, unit, piece, row, column = access.range
    parts = map(one_range, (unit, piece), (row, column), sizes)
    return type(access)((*lead, *parts))


def one_range(outer, inner, size: int) -> slice:
    if isinstance(outer, slice):
        return slice(outer.start * size, outer.stop * size, 1)
    begin, end = (inner.start, inner.stop) if isinstance(inner, slice) else (inner, inner + 1)
    return slice(outer * size + begin, outer * size + end, 1)


def share_memory(token, member_keys_as_array, alias_group_idxs):
    """In place of `_tag_ref_union`: all members but the first become views of it."""
    shared, state = host._get_shared_memory(), host.get_races()
    first, *others = map(memory.HostAllocationKey.from_array, member_keys_as_array)
    matrix = shared.mem[first].content
    for other in others:
        if shared.mem[other].content.shape == matrix.shape:
            shared.mem[other]._content = matrix.view(shared.mem[other].content.dtype)
            state.tiles[other] = first, None
            continue
        *lead, units, pieces, rows, columns = shared.mem[other].content.shape
        tiles = matrix.reshape(*lead, units, rows, pieces, columns).swapaxes(-3, -2)
        shared.mem[other]._content = tiles
        state.tiles[other] = first, (rows, columns)
    return token


class SharedResults(memory.GPUSharedMemory):
    """Results, which begin as NaN, are written once, or the same again where units overlap."""

    def store_buffer_content(self, key, access, value, *args, **options):
        self._check_results(key, access, value)
        return super().store_buffer_content(key, access, value, *args, **options)

    def swap_buffer_content(self, key, access, value, *args, **options):
        self._check_results(key, access, value)
        return super().swap_buffer_content(key, access, value, *args, **options)

    def _check_results(self, key, access, value):
        if key.memory_space_id != GMEM:
            return
        old, *_ = self.get_buffer_content(key, access, None, increment_clock=False)
        if not np.all(np.isnan(np.float32(old)) | (old == value)):
            raise RuntimeError(f"RACE DETECTED\n  other results are overwritten: {key}[{access}]")
