"""The backends that run on torch tensors."""
