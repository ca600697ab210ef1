"""What the kernel can do, and a call's options as it takes them."""

import os
from dataclasses import replace

import numpy as np

from ...backend import Backend
from ...batch import Sequences
from ...call import Call
from ...ragged import namespace
from ...registry import Framework, can_load, load
from .compiled import CODES
from .job import NO_WINDOW

HONOURS = frozenset(
    {"scale", "causal", "sliding_window", "logits_soft_cap", "alibi_slopes", "return_lse"}
)
LONGEST = 16  # queries of a sequence


def refusals(call: Call) -> list[str]:
    if call.dtype in CODES:
        return []
    return [f"it computes {', '.join(CODES)}, not {call.dtype}"]


def numbers(call: Call) -> np.ndarray:
    """scale, soft-cap (0: none), and the slopes of ALiBi if there are any."""
    slopes = call.spec.alibi_slopes or ()
    return np.asarray([call.scale, call.spec.logits_soft_cap or 0.0, *slopes], np.float32)


def options(call: Call, threads: int) -> np.ndarray:
    window = NO_WINDOW if call.window is None else call.window
    facts = call.spec.causal, window, LONGEST, threads, call.itemsize, CODES[call.dtype]
    return np.asarray(facts, np.int64)


def num_threads() -> int:
    """`OMP_NUM_THREADS`, or else the number of CPUs that this process may run on."""
    asked = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if asked.isdecimal() and int(asked) > 0:
        return int(asked)
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def unfit(call: Call) -> list[str]:
    """Sequences of many queries are faster by matrix products."""
    if call.longest_query <= LONGEST or call.num_tokens < call.num_seqs * call.longest_query:
        return []
    return [f"no sequence of fewer than {LONGEST + 1} queries is likely: products are faster"]


def partner(call: Call, framework: Framework) -> Backend:
    """The backend that computes sequences of more queries than LONGEST."""
    names = ("sdpa", "xla") if framework is Framework.JAX else ("sdpa",)
    backends = [load(name, framework) for name in names if can_load(name, framework)]
    return next((b for b in backends if not b.unfit(call)), backends[-1])


def long_ones(batch: Sequences) -> Sequences:
    """The batch, in which short queries see no key: another backend spends no work on them."""
    short = batch.query_lens <= LONGEST
    return replace(batch, seq_lens=namespace(short).where(short, 0, batch.seq_lens))
