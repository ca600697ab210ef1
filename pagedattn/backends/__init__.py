"""The backends that run on JAX alone."""
