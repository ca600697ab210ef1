"""The metadata of a step: its fields, what is derived from them, and the batches they make."""

from .attention_metadata import AttentionMetadata

__all__ = ["AttentionMetadata"]
