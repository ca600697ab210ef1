"""What the kernel can do, and a call's options as it takes them."""

import os
from collections.abc import Iterable

import numpy as np

from ..._dispatch.call import ITEM_BYTES, Call
from ..._dispatch.options import SCALES
from ..._kernels.cpu.call_args import NO_WINDOW
from ..._kernels.cpu.compiled import multiplied
from ..._kernels.cpu.dtypes import DTYPES as HELD
from ..._kernels.cpu.dtypes import TOKENS, UNITS
from ..._kernels.cpu.prefill.micro_kernel import MicroKernel, micro_kernel

SUPPORTS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes"}
    | {"cache_dtype", "token_scales", "value_dim", "bias", "selection", "parents"}
    | {"return_lse", "batch_invariant", SCALES}
)
DTYPES = "bfloat16", "float16", "float32"
HEADS_OF_AMX = 2  # of 1, 2, 4 and 8 the fastest on 16 Intel cores


def refusals(call: Call) -> list[str]:
    """Why the kernel cannot run a call."""
    reasons = []
    if call.dtype not in DTYPES:
        reasons.append(f"it computes {', '.join(DTYPES)}, not {call.dtype}")
    if call.cache_dtype not in (None, *HELD):
        reasons.append(f"cache_dtype: the kernel does not read {call.cache_dtype}")
    return reasons


def cache_dtype_of(call: Call) -> str:
    return call.cache_dtype or call.dtype


def dtype_of(call: Call) -> str:
    """That of the query and out, as the kernel takes them."""
    return call.dtype if call.cache_dtype is None or call.dtype == "bfloat16" else "float32"


def dtypes_of(call: Call) -> tuple[str, ...]:
    """Those of the query and of the cache, and whether it has per-token scales.

    They say what machine code runs.
    """
    return dtype_of(call), cache_dtype_of(call), *[TOKENS.name] * call.token_scales


def longest(call: Call) -> int:
    """The most queries of a sequence that read pages in place; more of them pack the keys.

    0, all pack, where results are batch-invariant: decode's products add up in another order.
    """
    return 0 if call.batch_invariant else max(1, _kernel_of(call).decode_rows // call.group)


def most_heads(call: Call) -> int:
    """The most KV heads whose pages are read together, for few queries of a sequence each.

    AMX packs them, and the packed ones of all heads are more than the second level holds.
    """
    if not call.batch_invariant:
        return 1
    return HEADS_OF_AMX if _kernel_of(call).tiles else call.num_kv_heads


def _kernel_of(call: Call) -> MicroKernel:
    _, tiles = multiplied(*(HELD[name] for name in dtypes_of(call)))
    return micro_kernel(*tiles)


def itemsizes(call: Call) -> tuple[int, int]:
    """Bytes of a number of the query and out, and of one of the cache."""
    own = ITEM_BYTES[dtype_of(call)]
    return own, 1 if call.cache_dtype else own


def numbers(call: Call) -> np.ndarray:
    """scale, soft-cap (0: none), unit of the values, and the slopes of ALiBi if there are any."""
    slopes, unit = call.spec.alibi_slopes or (), UNITS.get(cache_dtype_of(call), 1.0)
    facts = call.scale * unit, call.spec.logits_soft_cap or 0.0, unit
    return np.asarray([*facts, *slopes], np.float32)


def options(call: Call, threads: int, brings: Iterable[bool]) -> np.ndarray:
    """The integers of a call, in the order in which `describe` of the numba backend reads them.

    `brings` says which arrays it brings, of a bias, the scales of keys and of values, a selection
    and a tree.
    """
    window = NO_WINDOW if call.window is None else call.window
    facts = call.spec.causal, window, longest(call), threads, most_heads(call), *itemsizes(call)
    return np.asarray([*facts, *brings], np.int64)


def num_threads() -> int:
    """`OMP_NUM_THREADS`, or else the number of CPUs that this process may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
