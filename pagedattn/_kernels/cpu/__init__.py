"""Paged attention compiled for the CPU at hand by Numba: decode and short queries, pages in place.

Nothing here knows a framework, Python, or the GIL: arrays are addresses and strides in a `JOB`.
A job is cut into pieces of work, which whichever threads come along claim from a counter.
"""
