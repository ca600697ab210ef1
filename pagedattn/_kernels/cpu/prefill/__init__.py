"""Prompts and chunks on a CPU: matrix products of packed keys and values, by the CPU's own rate.

A work item is a tile of the queries of one sequence and one KV head. It walks the keys in tiles,
packs a tile of keys and of values for all of its rows, and multiplies blocks of rows by them.
"""
