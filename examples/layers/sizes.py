"""The sizes of the stack of layers, and of its cache."""

from pagedattn import AttentionSpec

SIZE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 64, 4, 2, 16
SPECS = (AttentionSpec(sliding_window=8), AttentionSpec())  # of the layers of a pair, in turn
NUM_PAIRS = 3
NUM_LAYERS = NUM_PAIRS * len(SPECS)
NUM_BLOCKS, BLOCK_SIZE = 40, 4  # of each layer
