"""Attention over keys that are spread over devices: where they lie, how they are seen."""
