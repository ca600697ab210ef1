"""The heads of the model that all benchmarks use, and the arithmetic of a batch."""

HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
SUM = "a sum of as many bytes"  # the ceiling of decode, as a contender


def causal_flops(query_lens: list[int], seq_lens: list[int]) -> float:
    """Floating-point operations of both products of causal attention, over all heads.

    >>> causal_flops([1], [10]) / (4 * HEADS * HEAD_DIM)
    10.0
    """
    lens = zip(query_lens, seq_lens, strict=True)
    pairs = sum(q * (n - q) + q * (q + 1) / 2 for q, n in lens)
    return 4 * HEADS * HEAD_DIM * pairs
