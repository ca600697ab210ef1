"""XLA's stream as torch's own, and memory that XLA may go on writing to."""

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
    """Makes torch allocate from memory of this function on this device, which is never given back.

    XLA replays what is captured now without telling us. In torch's common memory, a temporary that
    is free again after this call would be handed to others while every replay writes to it.
    """
    if device.index not in pools:
        pools[device.index] = torch.cuda.MemPool()
    return torch.cuda.use_mem_pool(pools[device.index], device)
