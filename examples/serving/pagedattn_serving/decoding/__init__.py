"""Requests, their sequences, and how their next tokens are chosen."""
