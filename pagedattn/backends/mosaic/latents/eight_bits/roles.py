"""Who does what in a program over latents of eight bits, and with how many registers."""

HALVES = 2  # of the values: a warpgroup for each
# Registers a thread. Of the four warpgroups together at most 512, as a launch of 512 threads gets.
KEY_REGISTERS, VALUE_REGISTERS, LOAD_REGISTERS = 176, 144, 40
