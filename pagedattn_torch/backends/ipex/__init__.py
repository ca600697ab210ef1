"""Paged attention by Intel's extension for PyTorch 2.8, on CPUs and XPUs.

The extension is archived: 2.8 is its last release, and it needs torch 2.8. Arguments that its
operators get wrong are changed or kept from them, here and in the files of the two devices; what
they cannot do is refused.
"""

from torch import Tensor

from pagedattn._dispatch.backend import Backend
from pagedattn._dispatch.call import Call
from pagedattn.batch.indices import sequence_ids, token_positions
from pagedattn.masks import sees_a_key

from . import cpu, xpu
from .operators import why_unusable

SUPPORTS = frozenset({"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"})
DTYPES = {"cpu": ("float32", "bfloat16", "float16"), "xpu": ("bfloat16", "float16")}
DEVICES = {"cpu": cpu, "xpu": xpu}


def refusals(call: Call) -> list[str]:
    """Why the extension cannot run a call."""
    reasons = DEVICES[call.device].refusals(call)
    if call.dtype not in DTYPES[call.device]:
        takes = ", ".join(DTYPES[call.device])
        reasons.append(f"ipex takes {takes} on {call.device}, not {call.dtype}")
    return reasons


def slower_because(call: Call) -> list[str]:
    """Why `backend=None` takes another one: always, so that only who names it depends on it."""
    reasons = ["Intel has archived the extension in favour of PyTorch, which sdpa runs on"]
    return [*reasons, *DEVICES[call.device].slower_because(call)]


def lacks_alibi(call: Call) -> bool:
    """Whether the extension is installed, and has no ALiBi for this call."""
    device = DEVICES.get(call.device)
    return device is not None and not why_unusable() and device.lacks_alibi(call)


def run(
    call: Call, query: Tensor, cache, batch, *, out: tuple[Tensor, Tensor | None] | None = None
):
    result = query.new_zeros(call.out_shape) if out is None else out[0].zero_()
    DEVICES[call.device].attend(call, query, cache, batch, result)
    # The operators leave NaN or garbage in rows that see no key.
    return result.masked_fill_(~_seeing(call, batch)[:, None, None], 0), None


BACKEND = Backend(
    "ipex", SUPPORTS, run, refusals, slower_because, missing=lambda: why_unusable(), takes_out=True
)


def _seeing(call: Call, batch) -> Tensor:
    """Which tokens see a key."""
    seqs = sequence_ids(batch.query_start_loc, call.num_tokens)
    positions = token_positions(batch.query_start_loc, batch.seq_lens, call.num_tokens)
    seen = sees_a_key(positions, batch.seq_lens[seqs], call.spec.causal, call.window)
    return (seqs >= 0) & seen
