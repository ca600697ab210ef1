"""Runs torch on XLA's CUDA stream, and keeps the memory that captured calls allocate."""

import contextlib

import torch
import tvm_ffi


@contextlib.contextmanager
def xla_stream(device, pools):
    raw = tvm_ffi.get_raw_stream(tvm_ffi.device("cuda", device.index))
    with torch.cuda.device(device), torch.cuda.stream(torch.cuda.ExternalStream(raw, device)):
        if pools is None or not torch.cuda.is_current_stream_capturing():
            yield
        else:
            with kept_memory(device, pools):
                yield


def kept_memory(device, pools):
    """A context in which torch allocates from memory that only this function uses on this device.

    XLA replays what is captured now, and every replay writes to the temporaries of this call. In
    torch's common memory these would be free after the call, and given to other tensors.
    """
    if device.index not in pools:
        pools[device.index] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(pools[device.index], device)
