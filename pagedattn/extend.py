"""What the author of a backend imports.

A backend is a `Backend` record: its name, the options that it honours, and functions of a `Call`,
the facts of a call that are known before its values. `examples/own_backend.py` is a whole one.
"""

from .backend import Backend, Call, Sequences
from .gradient import with_xla_gradient
from .ragged import cdiv, positions, sequence_ids
from .visibility import key_range, visible_mask

__all__ = [
    "Backend",
    "Call",
    "Sequences",
    "cdiv",
    "key_range",
    "positions",
    "sequence_ids",
    "visible_mask",
    "with_xla_gradient",
]
