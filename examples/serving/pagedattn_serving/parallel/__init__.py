"""A model over several devices, and the kernel by which two GPUs add up."""
