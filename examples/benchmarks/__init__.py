"""Benchmarks: the library and its peers, timed side by side in one run."""
