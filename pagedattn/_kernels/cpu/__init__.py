"""Paged attention on the CPU at hand, half of it a generator of LLVM IR, half compiled by Numba.

The products, the softmax's vectors and the conversions of numbers are intrinsics: functions that
write LLVM IR for the vectors that the CPU has. What calls them is Python that Numba compiles: the
walk over pages, the schedule, the threads. Decode and short queries read pages in place; `prefill`
packs them for long ones.

Nothing here knows a framework or the GIL: arrays are addresses and strides in `CALL_ARGS`.
A call is cut into work items, which whichever threads come along claim from a counter.
"""
