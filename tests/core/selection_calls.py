"""Good calls that choose blocks and attend to them, for the fuzzer to start from."""

import jax.numpy as jnp
from public_calls import ragged_arguments, shared, tensors

import pagedattn as pa
import pagedattn_torch as pt


def selection():
    batch, heads = shared()["batch"], shared()["cache"].num_kv_heads
    return pa.Selection(jnp.zeros((batch.num_seqs, heads, 2), jnp.int32))


def chosen(function, **others):
    return lambda: (function, {**shared(), "selection": selection(), **others})


def chosen_tensors(function, **others):
    def make():
        arguments = {**shared(), "selection": selection()}
        names = "query", "cache", "selection"
        return function, arguments | {n: tensors(arguments[n]) for n in names} | others

    return make


def chosen_keys():
    return pa.Selection(jnp.zeros((2, 2, 1), jnp.int32))


def torch_ragged():
    given = ragged_arguments() | {"backend": None, "selection": chosen_keys()}
    names = "query", "key", "value", "query_start_loc", "key_start_loc", "sinks", "selection"
    return pt.ragged_attention, given | {name: tensors(given[name]) for name in names}


def attend_in_step():
    given = chosen_tensors(pt.prepare)()[1]
    step = pt.prepare(**given)
    return step.attend, {name: given[name] for name in ("query", "cache", "selection")}


def made():
    """What `summarise_blocks` takes."""
    return {"cache": shared()["cache"], "batch": shared()["batch"]}


def summaries():
    return pa.summarise_blocks(**made())


def scores():
    batch, heads = shared()["batch"], shared()["cache"].num_kv_heads
    return jnp.zeros((batch.num_seqs, heads, batch.max_blocks))


SELECTION = {
    "paged_attention to chosen blocks": chosen(pa.paged_attention, backend="xla"),
    "paged_attention to chosen blocks by any": chosen(pa.paged_attention, backend=None),
    "explain of chosen blocks": chosen(pa.explain),
    "select_backend for chosen blocks": chosen(pa.select_backend),
    "ragged_attention to chosen keys": lambda: (
        pa.ragged_attention,
        {**ragged_arguments(), "selection": chosen_keys()},
    ),
    "summarise_blocks": lambda: (
        pa.summarise_blocks,
        {**made(), "kind": "mean", "dtype": "float16"},
    ),
    "update_summaries": lambda: (pa.update_summaries, {"summaries": summaries(), **made()}),
    "score_blocks": lambda: (
        pa.score_blocks,
        {"query": shared()["query"], "summaries": summaries(), "batch": shared()["batch"]},
    ),
    "select_blocks": lambda: (
        pa.select_blocks,
        {"scores": scores(), "batch": shared()["batch"], "num_blocks": 2, "first": 1, "last": 1},
    ),
    "torch paged_attention to chosen blocks": chosen_tensors(pt.paged_attention, backend=None),
    "torch explain of chosen blocks": chosen_tensors(pt.explain),
    "torch select_backend for chosen blocks": chosen_tensors(pt.select_backend),
    "torch ragged_attention to chosen keys": torch_ragged,
    "prepare for chosen blocks": chosen_tensors(pt.prepare),
    "Step.attend to chosen blocks": attend_in_step,
}
