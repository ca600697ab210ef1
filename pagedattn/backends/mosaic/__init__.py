"""Paged attention of long queries on Hopper GPUs, in Pallas Mosaic GPU: JAX and nothing else.

Pages are loaded by TMA, one load a page, so that a cache in blocks of 16 costs what one in a row
does.
"""

from .launch import refusals as refusals
from .launch import run as run
