"""Sizes, block pools and caches: the memory that sequences live in."""
