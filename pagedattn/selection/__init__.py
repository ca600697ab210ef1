"""Attention over chosen blocks: what blocks are like, how good they are, and which are taken."""
