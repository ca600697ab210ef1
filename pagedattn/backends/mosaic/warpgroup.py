"""A warpgroup, whose warps multiply together: four of 32 threads."""

WARPS = 4
THREADS = 32 * WARPS
