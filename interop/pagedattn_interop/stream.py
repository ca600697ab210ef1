"""Runs torch on XLA's CUDA stream, and keeps the memory that captured calls allocate."""

import contextlib

import torch
import tvm_ffi


@contextlib.contextmanager
def xla_stream(device, pools):
    """A context in which torch launches on XLA's stream of a CUDA device, and allocates for it.

    While XLA captures that stream into a CUDA graph, memory comes from `pools` (see `kept_memory`);
    with None, from torch's common memory.
    """
    raw = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device.index))
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(raw, device)):
        if pools is None or not torch.cuda.is_current_stream_capturing():
            yield
        else:
            with kept_memory(device, pools):
                yield


def kept_memory(device, pools):
    """A context in which torch allocates from memory that only one torch function uses.

    `pools` are those of that function, by the device's index.

    XLA replays what is captured now, and every replay writes to the temporaries of this call. In
    torch's common memory these would be free after the call, and given to other tensors.
    """
    if device.index not in pools:
        pools[device.index] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(pools[device.index], device)
