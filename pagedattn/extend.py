"""What the author of a backend imports.

A backend is a `Backend` record: its name, the options that it supports, and functions of a `Call`,
the facts of a call that are known before its values. `examples/own_backend.py` is a whole one.
"""

from ._arrays.namespace import cdiv
from ._dispatch.backend import Backend, Call, Plan, Run, Sequences
from ._dispatch.call import Strides
from .backends.gradient import with_xla_gradient
from .backends.triton_call import triton_call
from .batch.indices import positions, sequence_ids
from .masks import key_range, visible_mask

__all__ = [
    "Backend",
    "Call",
    "Plan",
    "Run",
    "Sequences",
    "Strides",
    "cdiv",
    "key_range",
    "positions",
    "sequence_ids",
    "triton_call",
    "visible_mask",
    "with_xla_gradient",
]
