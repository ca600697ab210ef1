"""What the Flax and the Equinox example share: one cache for all layers, and a growing batch."""
