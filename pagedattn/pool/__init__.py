"""Block management as pure arrays: who owns which block."""
