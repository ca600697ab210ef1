"""The kernels themselves, without a framework: those of Triton and those that Numba compiles."""
