"""A call cut into pieces of about as many keys each, so that all threads have as much to do."""

import numpy as np

from .call_args import APART, JOB, PIECE, job_at, piece_at
from .compiling import fast
from .memory import aligned_alloc, get_int32, memcpy, memset, put_float32, put_int64
from .simd import LANES
from .softmax import CHUNK, NONE, key_range

PIECES = 4  # for each thread, if there are keys enough
LEAST_BYTES = 1 << 18  # of keys and values in a piece of a longer sequence
BYTES_OF_A_THREAD = 1 << 18  # with fewer of them for each, fewer threads are faster
JOB_BYTES, PIECE_BYTES = JOB.itemsize, PIECE.itemsize


@fast
def begin(call):
    """The address of a job with the fields of a call, and its pieces.

    Its users are as many threads as may work on it, and whoever asked for it.
    """
    given = job_at(call)
    columns = 2 * LANES  # a multiple of what any product takes at a time
    row_bytes = 4 * columns * -(-max(given.head_dim, given.value_dim) // columns)
    keys, most_queries = measure(given)
    token_bytes = bytes_of_token(given)
    threads = min(given.threads, 1 + keys * token_bytes // BYTES_OF_A_THREAD)
    size = piece_keys(keys, threads, token_bytes)
    num_pieces, num_cut, num_states = count_pieces(given, size)
    rows = most_queries * given.num_kv_heads * given.group
    state_bytes = APART * -(-rows * (row_bytes + 8) // APART)
    pieces_bytes, partials_bytes = num_pieces * PIECE_BYTES, num_cut * APART
    partials_bytes += num_states * state_bytes
    address = aligned_alloc(APART, JOB_BYTES + pieces_bytes + partials_bytes)
    memcpy(address, call, JOB_BYTES)
    job = job_at(address)
    job.threads = max(1, min(threads, num_pieces))
    job.users, job.claimed, job.done, job.num_pieces = job.threads + 1, 0, 0, num_pieces
    job.pieces = address + JOB_BYTES
    job.partials = job.pieces + pieces_bytes
    job.state_bytes, job.row_bytes, job.rows = state_bytes, row_bytes, rows
    set_pieces(job, size)
    return address


@fast
def bytes_of_token(job):
    """What is read of the cache for one key; a latent cache has its values among the keys."""
    columns = job.head_dim if job.value == job.key else job.head_dim + job.value_dim
    return job.num_kv_heads * columns * job.cache_itemsize


@fast
def sequence(job, seq, token):
    """A sequence's first token, number of tokens and length; the one before ends at `token`."""
    token = min(max(token, np.int64(get_int32(job.starts, seq))), job.num_tokens)
    end = min(max(token, np.int64(get_int32(job.starts, seq + 1))), job.num_tokens)
    seq_len = min(max(np.int64(get_int32(job.seq_lens, seq)), 0), job.max_blocks * job.block_size)
    return token, end - token, seq_len


@fast
def keys_of(job, num_queries, seq_len):
    """The range of keys that the queries of a sequence see."""
    context = seq_len - num_queries
    return key_range(job, seq_len, context, context + num_queries - 1)


@fast
def is_ours(job, num_queries):
    return num_queries > 0 and num_queries <= job.longest


@fast
def measure(job):
    """The number of keys to read, and the most queries of a sequence."""
    token, keys, most = np.int64(0), np.int64(0), np.int64(1)
    for seq in range(job.num_seqs):
        token, num_queries, seq_len = sequence(job, seq, token)
        token += num_queries
        if is_ours(job, num_queries):
            first, last = keys_of(job, num_queries, seq_len)
            keys += last - first
            most = max(most, num_queries)
    return keys, most


@fast
def piece_keys(keys, threads, token_bytes):
    """The most keys of a piece; one thread takes whole sequences."""
    if threads <= 1:
        return max(keys, np.int64(1))
    size = max(keys // (threads * PIECES), LEAST_BYTES // token_bytes)
    return CHUNK * (1 + size // CHUNK)


@fast
def parts_of(first, last, size):
    return max(1, -(-(last - first) // size))


@fast
def count_pieces(job, size):
    """The number of pieces, of sequences in several, and of the pieces of these."""
    token, pieces, cut, states = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for seq in range(job.num_seqs):
        token, num_queries, seq_len = sequence(job, seq, token)
        token += num_queries
        if is_ours(job, num_queries):
            first, last = keys_of(job, num_queries, seq_len)
            parts = parts_of(first, last, size)
            pieces += parts
            if parts > 1:
                cut, states = cut + 1, states + parts
    return pieces, cut, states


@fast
def set_pieces(job, size):
    """Writes the pieces, and the rows that no sequence owns."""
    token, at, free = np.int64(0), job.pieces, job.partials
    for seq in range(job.num_seqs):
        end = token
        token, num_queries, seq_len = sequence(job, seq, end)
        clear_rows(job, end, token)
        if is_ours(job, num_queries):
            first, last = keys_of(job, num_queries, seq_len)
            parts = parts_of(first, last, size)
            finished, state = np.int64(0), np.int64(0)
            if parts > 1:
                finished, state = free, free + APART
                put_int64(finished, 0, 0)
                free = state + parts * job.state_bytes
            for part in range(parts):
                piece = piece_at(at)
                piece.seq, piece.token = seq, token
                piece.num_queries, piece.seq_len = num_queries, seq_len
                piece.first = first + part * size
                piece.last = min(last, first + (part + 1) * size)
                piece.part, piece.parts = part, parts
                piece.state, piece.finished = state, finished
                at += PIECE_BYTES
                state += job.state_bytes if parts > 1 else 0
        token += num_queries
    clear_rows(job, token, job.num_tokens)


@fast
def clear_rows(job, first, last):
    """out 0 and lse -inf."""
    heads = job.num_kv_heads * job.group
    row_bytes = heads * job.value_dim * job.itemsize
    memset(job.out + first * row_bytes, 0, (last - first) * row_bytes)
    if job.lse != 0:
        for i in range(first * heads, last * heads):
            put_float32(job.lse, i, NONE)
