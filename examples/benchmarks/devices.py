"""What several devices gain: the same work on one of them and on all, in one run.

    export PYTHONPATH=examples:. XLA_PYTHON_CLIENT_PREALLOCATE=false
    python -m benchmarks.devices [-o docs/results/devices.json] [-k attention] [--layers 6]

Heads are spread in "attention", "decode loop" and "decode by XLA's sums" (parallel/tensor.py; the
last without parallel/peer_llama.py), keys in "context" (examples/context_parallel.py). `--small` is
for machines without GPUs: it shows that all of it runs, and its times mean nothing.
"""

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pagedattn_serving.engine.generation import Generation, decode_loop
from pagedattn_serving.families.decoder import Decoder
from pagedattn_serving.families.llama import Llama
from pagedattn_serving.parallel.peer_llama import by_peers
from pagedattn_serving.parallel.tensor import AXIS, EVERYWHERE, HEADS, PAGES, OverHeads, start_over

from benchmarks.chosen import chosen
from benchmarks.machine import caption, machine, write
from benchmarks.models import SHAPES, spread_params
from benchmarks.random_arrays import BLOCK_SIZE, random_cache, random_decodes
from benchmarks.timing import CALLS, LAYERS, layers_of, seconds_a_call
from benchmarks.whole_step import median_of_runs
from pagedattn import AttentionSpec, append_tokens, merge_across, paged_attention
from pagedattn.extend import cdiv

STEPS, RUNS = 20, 5  # of the decode loop
# Enqueued at a time where the devices are threads of a CPU: with 40 those of later calls take the
# places that an earlier one needs, until XLA gives up.
FEW_CALLS = 20

SMALL = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}


def block_of(model: Llama) -> tuple[int, int, int]:
    return BLOCK_SIZE, model.num_key_value_heads, model.head_dim


def attention(mesh: Mesh, model: Llama, num_seqs: int, length: int) -> float:
    """Seconds of a layer's attention, its heads spread."""
    shape = num_seqs * cdiv(length, BLOCK_SIZE), *block_of(model)
    cache = random_cache(shape, sharding=NamedSharding(mesh, PAGES))
    return a_layer(mesh, model, num_seqs, length, cache, paged_attention, HEADS, PAGES)


def context(mesh: Mesh, model: Llama, num_seqs: int, length: int) -> float:
    """Seconds of a layer's attention, the keys of each sequence spread."""
    here, spread = cdiv(length, mesh.size), PartitionSpec(AXIS)
    num_blocks = mesh.size * num_seqs * cdiv(here, BLOCK_SIZE)
    shape = num_blocks, *block_of(model)
    cache = random_cache(shape, sharding=NamedSharding(mesh, spread))

    def attend(query, cache, batch):
        spec = AttentionSpec(causal=False)
        return merge_across(*paged_attention(query, cache, batch, spec, return_lse=True), AXIS)[0]

    return a_layer(mesh, model, num_seqs, here, cache, attend, EVERYWHERE, spread)


def a_layer(mesh, model, num_seqs, length, cache, attend, heads, pages) -> float:
    """Seconds of `attend` on decodes over so many keys a device, in a program of many layers."""
    query = jnp.ones((num_seqs, model.num_attention_heads, model.head_dim), jnp.bfloat16)
    ins = heads, pages, EVERYWHERE
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=ins, out_specs=heads)
    query = jax.device_put(query, NamedSharding(mesh, heads))
    batch = jax.device_put(random_decodes(num_seqs, length), NamedSharding(mesh, EVERYWHERE))
    calls = FEW_CALLS if jax.default_backend() == "cpu" else CALLS
    layers = layers_of(lambda query, part: mapped(query, *part), query, [(cache, batch)])
    return seconds_a_call(layers, calls=calls) / LAYERS


def loop(mesh: Mesh, model: Llama, num_seqs: int, length: int) -> float:
    """Seconds of a token of the whole model in one compiled program."""
    return a_token(mesh, *by_peers(mesh, model, spread_params(mesh, model)), num_seqs, length)


def by_xla(mesh: Mesh, model: Llama, num_seqs: int, length: int) -> float:
    """The same where XLA adds, whatever the devices can do."""
    return a_token(mesh, model, spread_params(mesh, model), num_seqs, length)


def a_token(mesh: Mesh, model: Decoder, params: dict, num_seqs: int, length: int) -> float:
    state = state_after(mesh, model, params, num_seqs, length, max_new_tokens=(RUNS + 2) * STEPS)
    how = {"temperature": None, "max_steps": STEPS, "attend": OverHeads(mesh)}
    run = partial(decode_loop, params, model, **how)
    return median_of_runs(run, run(state=state), RUNS)[0] / STEPS


def state_after(mesh, model, params, num_seqs, length, max_new_tokens) -> Generation:
    """Sequences of which all but the last token are cached, as random keys and values."""
    prompts = [[1] * length] * num_seqs
    sizes = {
        "max_new_tokens": max_new_tokens,
        "num_blocks": num_seqs * cdiv(length + max_new_tokens, BLOCK_SIZE),
        "block_size": BLOCK_SIZE,
    }
    state = start_over(mesh, params, model, prompts, list(range(num_seqs)), **sizes)
    grow = jax.jit(partial(append_tokens, max_new_tokens=length))
    pool, _ = grow(state.pool, jnp.full(num_seqs, length - 1, jnp.int32))
    shape = state.caches[0].key.shape
    del state.caches[:]
    sharding, layers = NamedSharding(mesh, PAGES), range(len(params["layers"]))
    caches = [random_cache(shape, sharding=sharding, seed=layer) for layer in layers]
    return replace(state, pool=pool, caches=caches)


WORK = {
    "attention": (attention, (64, 4096), (4, 64)),
    "context": (context, (1, 1 << 20), (1, 1024)),
    "decode loop": (loop, (64, 4096), (4, 64)),
    "decode by XLA's sums": (by_xla, (64, 4096), (4, 64)),
}


def measured(names: list[str], small: bool, sizes: dict) -> dict[str, dict[str, float]]:
    """Seconds of each work on one device and on all."""
    results = {}
    for name in names:
        work, *shapes = WORK[name]
        num_seqs, length = shapes[small]
        meshes = [Mesh(np.array(jax.devices()[:n]), AXIS) for n in (1, jax.device_count())]
        model = replace(SHAPES["llama-8b"], **sizes)
        one, all_ = (work(mesh, model, num_seqs, length) for mesh in meshes)
        results[f"{name}, {num_seqs} x {length}"] = {"one": one, "all": all_}
        print(
            f"{name}: {one * 1e6:.1f} us on one, {all_ * 1e6:.1f} us on all, {one / all_:.2f}",
            flush=True,
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("-o", "--out", type=Path, help="write the seconds there, as JSON")
    parser.add_argument("-k", "--only", default="", help="work whose name contains this")
    parser.add_argument("--layers", type=int, help="of the model, in the decode loop")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    arguments = parser.parse_args()
    names = chosen(parser, arguments.only, WORK)
    sizes = SMALL if arguments.small else {}
    if arguments.layers:
        sizes = sizes | {"num_hidden_layers": arguments.layers}
    about = machine() | {"devices": jax.device_count()}
    about |= {"layers": arguments.layers, "small": arguments.small}
    print(caption(about))
    seconds = measured(names, arguments.small, sizes)
    write(arguments.out, {"machine": about, "seconds": seconds})


if __name__ == "__main__":
    main()
