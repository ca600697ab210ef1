"""Layers with a sliding window give memory back: one program, a pool for each kind of layer.

    python examples/window_memory.py
    python examples/window_memory.py --new-tokens 2000 --picture windows.png

A small random Gemma 2, in which every other layer has a window, decodes far past that window in one
`lax.scan`. Layers of one window share a pool, whose tables say where a sequence lies in the caches
of them all. After each step `release_behind` gives back what lies behind the window. So the caches
of windowed layers stay small, however long the sequences become: printed is how many blocks are
owned. Another run gives nothing back; the exit status is 1 if its tokens are others.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from matplotlib.figure import Figure
from pagedattn_serving.demo.occupancy import FREE, Owners, draw_owners
from pagedattn_serving.families.gemma import Gemma2
from pagedattn_serving.training.initial import large_params

from pagedattn import (
    BlockPool,
    KVCache,
    init_block_pool,
    init_kv_cache,
    next_batches,
    paged_attention,
    release_behind,
    write_kv,
)
from pagedattn.extend import cdiv

MODEL = Gemma2(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=8192,
    query_pre_attn_scalar=16.0,
    sliding_window=24,
    layer_types=("sliding_attention", "full_attention") * 2,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)
WINDOWS = [MODEL.attention_spec(i).sliding_window for i in range(MODEL.num_hidden_layers)]
GROUPS = list(dict.fromkeys(WINDOWS))  # a pool for each of these windows, None being no window
PROMPT_LENS, BLOCK_SIZE = (3, 11, 20, 6), 8
NUM_SEQS, LONGEST_PROMPT = len(PROMPT_LENS), max(PROMPT_LENS)


class State(NamedTuple):
    """What a step changes.

    Fields:
      pools: one for each of `GROUPS`.
      caches: one for each layer, of as many blocks as the pool of its group has.
    """

    pools: list[BlockPool]
    caches: list[KVCache]


def random_gemma() -> dict[str, Any]:
    """Large random weights, so that what is chosen depends on what is attended to."""
    # A Gemma's sizes have the names of a Llama's.
    params: dict[str, Any] = large_params(MODEL, jax.random.key(1))  # pyright: ignore[reportArgumentType]
    no_change = jnp.zeros(MODEL.hidden_size)  # norms are stored as differences from 1
    norms = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
    layers = [layer | dict.fromkeys(norms, no_change) for layer in params["layers"]]
    return params | {"layers": layers, "norm": no_change}


def most_blocks(window: int | None, longest: int) -> int:
    """How many blocks a sequence of up to `longest` tokens owns at a time."""
    if window is None:
        return cdiv(longest, BLOCK_SIZE)
    # Wherever the window begins in a block; or the prompt, which comes at once.
    return max(cdiv(window, BLOCK_SIZE) + 1, cdiv(LONGEST_PROMPT, BLOCK_SIZE))


def start(longest: int, gives_back: bool) -> State:
    """Pools in which every sequence can grow to the longest, and their caches."""
    rows = {"max_seqs": NUM_SEQS, "max_blocks": cdiv(longest, BLOCK_SIZE)}
    sizes = [NUM_SEQS * most_blocks(window if gives_back else None, longest) for window in GROUPS]
    heads = MODEL.num_key_value_heads, MODEL.head_dim
    return State(
        [init_block_pool(size, BLOCK_SIZE, **rows) for size in sizes],
        [
            init_kv_cache(sizes[GROUPS.index(window)], BLOCK_SIZE, *heads, dtype=jnp.float32)
            for window in WINDOWS
        ],
    )


def step(params: dict, gives_back: bool, state: State, tokens, new, max_query_len: int, key):
    """Feeds `new[s]` tokens of each sequence, gives back what no later one sees, samples the next.

    Returns the state, the next tokens, the owners of each pool's blocks, and whether they sufficed.
    """
    sizes = {"num_tokens": len(tokens), "max_query_len": max_query_len}
    pools, batches, growths = next_batches(state.pools, new, **sizes)
    hidden, caches = MODEL.embed(params, tokens), []
    for index, (layer, cache) in enumerate(zip(params["layers"], state.caches, strict=True)):
        batch, spec = batches[GROUPS.index(WINDOWS[index])], MODEL.attention_spec(index)
        query, key_rows, value_rows = MODEL.heads(index, layer, hidden, batch.positions)
        caches.append(write_kv(cache, key_rows, value_rows, batch.slot_mapping))
        out = paged_attention(query, caches[-1], batch, spec)
        hidden = MODEL.rest(layer, hidden, out.reshape(len(tokens), -1))
    owners, ok = [owners_of(pool) for pool in pools], growths[0].ok.all()
    if gives_back:  # all layers have attended: now it can be done
        pools = [
            pool if window is None else release_behind(pool, window)[0]
            for pool, window in zip(pools, GROUPS, strict=True)
        ]
    logits = MODEL.logits(params, hidden[jnp.cumsum(new) - 1])
    chosen = jax.random.categorical(key, logits).astype(jnp.int32)
    return State(pools, caches), chosen, owners, ok


def owners_of(pool: BlockPool) -> Int[Array, "num_blocks"]:
    """The sequence that owns each block, or `FREE`."""
    owned = (jnp.arange(pool.max_blocks) < pool.seq_blocks[:, None]) & (pool.block_tables >= 0)
    blocks = jnp.where(owned, pool.block_tables, pool.num_blocks)
    rows = jnp.broadcast_to(jnp.arange(pool.max_seqs)[:, None], blocks.shape)
    return jnp.full(pool.num_blocks, FREE).at[blocks].set(rows, mode="drop")


@partial(jax.jit, static_argnames=("gives_back", "steps"), donate_argnames="state")
def generate(params: dict, state: State, gives_back: bool, steps: int):
    """Random prompts, then `steps` tokens of each sequence; the host sees nothing before the end.

    Returns the state, updated in place; tokens `[steps, num_seqs]`, the owners of each pool's
    blocks at each step, and whether they sufficed.
    """
    prompt_key, first_key, *_ = keys = jax.random.split(jax.random.key(0), steps + 1)
    prompts = jax.random.randint(prompt_key, (sum(PROMPT_LENS),), 0, MODEL.vocab_size)
    one = partial(step, params, gives_back)
    state, *first = one(state, prompts, jnp.array(PROMPT_LENS), LONGEST_PROMPT, first_key)

    def decode(carry, key):
        state, tokens = carry
        state, chosen, *others = one(state, tokens, jnp.ones(NUM_SEQS, jnp.int32), 1, key)
        return (state, chosen), [chosen, *others]

    (state, _), rest = jax.lax.scan(decode, (state, first[0]), keys[2:])
    return state, *jax.tree.map(lambda x, xs: jnp.concatenate([x[None], xs]), first, rest)


def show(owners: list[Owners], state: State) -> None:
    """How many blocks of each pool were owned, at a dozen of the steps."""
    widest = max(pool.shape[1] for pool in owners)
    names = [f"window {window}" if window else "no window" for window in GROUPS]
    print("  step  " + "".join(f"{name:<40}" for name in names))
    for index in np.linspace(0, len(owners[0]) - 1, 12, dtype=int):
        counts = [int((pool[index] != FREE).sum()) for pool in owners]
        cells = [f"{count:>4} {'#' * (34 * count // widest):<35}" for count in counts]
        print(f"{index:>6}  " + "".join(cells).rstrip())
    for name, window in zip(names, GROUPS, strict=True):
        caches = [c for c, w in zip(state.caches, WINDOWS, strict=True) if w == window]
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
        print(f"Caches of {len(caches)} layers, {name}: {held / 1e3:,.0f} KB")


def plot(owners: list[Owners]) -> Figure:
    """Which sequence owned which block of each pool when."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    all_axes = figure.subplots(len(GROUPS), 1, sharex=True)
    for axes, window, pool in zip(all_axes, GROUPS, owners, strict=True):
        draw_owners(axes, pool)
        name = f"with a window of {window} tokens" if window else "without a window"
        axes.set_title(f"The sequence in each block of {BLOCK_SIZE} tokens, in layers {name}")
    all_axes[-1].set_xlabel("step")
    return figure


def run(steps: int, gives_back: bool):
    """Tokens, owners of each pool's blocks, the last state, and whether the blocks sufficed."""
    state = start(LONGEST_PROMPT + steps, gives_back)
    state, tokens, owners, ok = generate(random_gemma(), state, gives_back, steps)
    return np.asarray(tokens), jax.tree.map(np.asarray, owners), state, bool(ok.all())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--new-tokens", type=int, default=240)
    parser.add_argument("--picture", type=Path, help="draw who owned which block there")
    args = parser.parse_args(arguments)
    runs = [run(args.new_tokens, gives_back) for gives_back in (False, True)]
    titles = ("Blocks owned", "Blocks owned, those behind windows given back")
    for title, (_, owners, state, _) in zip(titles, runs, strict=True):
        print(f"\n{title}")
        show(owners, state)
    if args.picture:
        plot(runs[1][1]).savefig(args.picture, dpi=130)
    same = (runs[0][0] == runs[1][0]).all() and all(ok for *_, ok in runs)
    print("\nThe tokens are the same." if same else "\nThe tokens differ, or blocks ran out.")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
