"""Paged attention of long queries on Hopper GPUs, in Pallas Mosaic GPU: JAX and nothing else.

Pages are loaded by TMA, one load a page, so that a cache in blocks of 16 costs what one in a row
does.
"""

from ...backend import Backend
from ...gradient import with_xla_gradient
from .launch import HONOURS, refusals, run, unfit

BACKEND = Backend("mosaic", HONOURS, with_xla_gradient(run), refusals, unfit)
