"""Keys and values in planes of their own: long queries, chunks and mixed batches."""
