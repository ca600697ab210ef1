"""What the functions on block pools require of their arguments."""

from .checks import MAX_SLOTS, ids, int_array, is_count, known, require


def counts(**sizes) -> None:
    for name, size in sizes.items():
        require(is_count(size), f"{name} must be an integer above 0, got {size!r}")
    slots = sizes["num_blocks"] * sizes["block_size"]
    require(slots <= MAX_SLOTS, f"num_blocks * block_size must fit int32, got {slots}")


def growth(num_tokens, max_seqs, max_new_tokens) -> None:
    per_sequence("num_tokens", num_tokens, max_seqs)
    require(
        max_new_tokens is None or is_count(max_new_tokens, 0),
        f"max_new_tokens must be an integer of at least 0, got {max_new_tokens!r}",
    )


def batch(query_lens, seq_lens, num_tokens, max_query_len) -> None:
    per_sequence("query_lens", query_lens, len(seq_lens))
    queries, lens = known(query_lens), known(seq_lens)
    if queries is None or lens is None:
        return
    require(
        (queries <= lens).all(),
        f"query_lens must not exceed the sequences' lengths {lens.tolist()}, got "
        f"{queries.tolist()}; append the tokens first",
    )
    require(
        queries.sum() <= num_tokens and queries.max(initial=0) <= max_query_len,
        f"query_lens {queries.tolist()} need num_tokens of {queries.sum()} and max_query_len of "
        f"{queries.max(initial=0)} at least, got {num_tokens} and {max_query_len}",
    )


def ids_or_none(name, array, bound) -> None:
    """Ids of blocks, or -1."""
    int_array(name, array, 1)
    values = known(array)
    if values is not None:
        ids(name, values[values != -1], bound, "blocks (or -1)")


def per_sequence(name, array, max_seqs) -> None:
    int_array(name, array, 1)
    require(len(array) == max_seqs, f"{name} must have {max_seqs} entries, got {len(array)}")
    values = known(array)
    if values is not None:
        require((values >= 0).all(), f"{name} must not be negative, got {values.tolist()}")


def rows(bound, **lists) -> None:
    """Lists of rows of a pool, equally long; -1 names none."""
    for name, array in lists.items():
        int_array(name, array, 1)
        values = known(array)
        if values is not None:
            ids(name, values[values != -1], bound, "sequences (or -1)")
    sizes = {len(array) for array in lists.values()}
    require(len(sizes) == 1, f"{' and '.join(lists)} must be equally long, got {sorted(sizes)}")


def prefix(blocks, num_tokens, pool) -> None:
    int_array("blocks", blocks, 1)
    require(
        len(blocks) <= pool.max_blocks,
        f"blocks must fit a table row of {pool.max_blocks}, got {len(blocks)}",
    )
    values, tokens = known(blocks), known(num_tokens)
    if values is None or tokens is None:
        return
    used = values[: -(-tokens // pool.block_size)]
    room = len(values) * pool.block_size
    require(0 <= tokens <= room, f"num_tokens must be from 0 to {room}, got {tokens}")
    ids("blocks", used, pool.num_blocks, "blocks")


def same_blocks(pool, other) -> None:
    sizes = (pool.block_size, other.block_size)
    require(sizes[0] == sizes[1], f"both pools must have one block_size, got {sizes}")
