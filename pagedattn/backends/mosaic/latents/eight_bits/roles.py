"""Who does what in a program over latents of eight bits, and with how many registers."""

HALVES = 2  # of the values: a warpgroup for each
# Of a thread: in all at most as many as the program begins with, the same for each.
KEY_REGISTERS, VALUE_REGISTERS, LOAD_REGISTERS = 176, 144, 40
