"""Public calls with one tensor whose memory is not there, or that only stands for a tensor.

A program of its own, since a call that reads such memory ends the process: it prints what it is
about to try, and at last what went wrong.
"""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator

import jax
import numpy as np
import public_calls
import torch
from pagedattn_interop import to_jax, to_torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

import pagedattn as pa
import pagedattn_torch as pt
from pagedattn import KVCache, PagedAttentionError
from pagedattn._dispatch.registry import Framework, can_load

BACKENDS = [name for name in ("sdpa", "numba") if can_load(name, Framework.TORCH)]


class Wrapping(Tensor):
    """A tensor without memory: torch's operations on it are those on another, `held`."""

    @staticmethod
    def __new__(cls, held):
        facts = {"dtype": held.dtype, "device": held.device, "strides": held.stride()}
        made = Tensor._make_wrapper_subclass(cls, held.shape, **facts)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args, kwargs = pytree.tree_map(plain, (args, kwargs or {}))
        return pytree.tree_map_only(Tensor, cls, func(*args, **kwargs))


def plain(value):
    """The tensor that one of another kind stands for."""
    if isinstance(value, Wrapping):
        return value.held
    functional = isinstance(value, Tensor) and torch._is_functional_tensor(value)
    return torch._from_functional_tensor(value) if functional else value


def resized(tensor, share):
    """A copy whose storage has a part of its bytes; one that is cut begins behind a row."""
    storage = tensor.untyped_storage()
    storage.resize_(int(storage.nbytes() * share))
    return tensor


def strided(tensor):
    """A copy with gaps, of which the last element's is the only memory that is missing."""
    gaps = torch.stack([tensor, tensor], -1)[..., 0]
    storage = gaps.untyped_storage()
    storage.resize_(storage.nbytes() - 2 * tensor.element_size())
    return gaps


def nested(tensor, layout):
    """Two parts of a tensor as one."""
    parts = (tensor[:1], tensor[1:]) if tensor.ndim else (tensor[None], tensor[None])
    return torch.nested.nested_tensor([*parts], layout=layout)


FREED = {
    "freed": lambda t: resized(t, 0),
    "cut": lambda t: resized(t, 0.5),
    "cut between gaps": strided,
}
FAKE = {
    "fake": FakeTensorMode().from_tensor,
    "on meta": lambda t: t.to("meta"),
    "a fake view": lambda t: FakeTensorMode().from_tensor(torch.stack([t, t]))[1],
    "a view on meta": lambda t: torch.stack([t, t]).to("meta")[1],
    "functional": torch._to_functional_tensor,
    "wrapping": Wrapping,
    "nested": lambda t: nested(t, torch.strided),
    "jagged": lambda t: nested(t, torch.jagged),
    "sparse": lambda t: t.to_sparse(),
}


class Marked(Tensor):
    """The tensor of a call that is to be transformed."""

    def __new__(cls, tensor):
        return tensor.as_subclass(cls)


DIFFERENTIATING = ("grad", "jvp")
TRANSFORMS = {
    "vmap": lambda call, x: torch.vmap(call)(x[None]),
    "functionalize": lambda call, x: torch.func.functionalize(call)(x),
    "grad": lambda call, x: torch.func.grad(call)(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (torch.ones_like(x),)),
    "jit.trace": lambda call, x: torch.jit.trace(call, (x,), check_trace=False),
}
# Torch's own operations alone, which it may transform as it can.
PURE = ("pack_keys", "unpack_keys", "pack_values", "unpack_values", "split_kv_cache", "masks")
# Arguments that a call does not look at.
UNREAD = {"forward of an encoder": "['kv_cache']"}


def also() -> dict[str, Callable]:
    """Calls that the fuzzer has not."""

    def of_layer(backend, **options):
        def make():
            impl = type("Impl", (pt.AttentionImpl,), {"backend": backend})
            arguments = public_calls.forward("decoder")()[1] | options
            if options:
                arguments["kv_cache"] = arguments["kv_cache"].to(torch.int8)
            dtype = "int8" if options else "auto"
            return impl(num_heads=2, head_size=8, kv_cache_dtype=dtype).forward, arguments

        return make

    def prepared(backend):
        def make():
            _, arguments = public_calls.torch_attend(backend)()
            query, cache, batch = (arguments[name] for name in ("query", "cache", "batch"))
            step = pt.prepare(query, cache, batch, backend=backend)
            return step.attend, {"query": query, "cache": cache}

        return make

    def freed_later(backend):
        def make():
            _, arguments = public_calls.torch_attend(backend)()
            query, cache, batch = (arguments[name] for name in ("query", "cache", "batch"))
            step = pt.prepare(query, cache, batch, backend=backend)

            def attend(sequences):  # what torch itself keeps from being freed, if NumPy has read it
                return dataclasses.replace(step, batch=sequences).attend(query, cache)

            return attend, {"sequences": step.batch}

        return make

    def with_options(backend):
        def make():
            attend, arguments = public_calls.torch_attend(backend)()
            tokens, heads, _ = arguments["query"].shape
            added = {"sinks": torch.zeros(heads), "bias": torch.zeros(tokens, heads, 64)}
            return attend, arguments | added

        return make

    def quantised():
        attend, arguments = public_calls.torch_attend("numba")()
        planes = (plane.to(torch.int8) for plane in arguments["cache"].planes)
        cache = KVCache(*planes, torch.ones(()), torch.ones(()))
        return attend, arguments | {"cache": cache}

    def biased():
        fn, arguments = public_calls.forward("decoder")()
        meta = arguments.pop("attn_metadata")

        def attend(biases, **others):
            meta.set_attn_bias(biases, "decoder")
            return fn(attn_metadata=meta, **others)

        return attend, arguments | {"biases": [torch.zeros(3, 3), torch.zeros(1, 5)]}

    numbers = torch.tensor([3, 1]), torch.tensor([0, 5]), torch.tensor([[0, 0], [1, 2]])
    listed = dict(zip(("query_lens", "context_lens", "block_tables"), numbers, strict=True))
    return {
        "crossing": lambda: (to_jax, {"x": torch.ones(2, 3)}),
        "crossing by a copy": lambda: (lambda x: to_jax(x, copy=True), {"x": torch.ones(2, 3)}),
        "make_batch of tensors": lambda: (pa.make_batch, listed | {"block_size": 4}),
        "make_batch of lists of tensors": lambda: (
            lambda lens: pa.make_batch(lens, [0], [[0]], block_size=4),
            {"lens": [torch.tensor(3)]},
        ),
        "a size": lambda: (
            lambda size: pa.make_batch([1], [0], [[0]], block_size=size),
            {"size": torch.tensor(4)},
        ),
        "a scale": lambda: (
            lambda s: pa.AttentionSpec(scale=s),
            {"s": torch.ones(())},
        ),
        "masks": lambda: (
            pa.causal_mask,
            {"query_positions": torch.arange(3), "key_positions": torch.arange(5)},
        ),
        "pairs": lambda: (
            pt.TorchSDPABackend.copy_blocks,
            {"kv_caches": [torch.ones(2, 6, 4, 2, 8)], "src_to_dists": [[torch.tensor(0), 1]]},
        ),
        "slopes": lambda: (
            lambda s: pt.TorchSDPABackendImpl(2, 8, alibi_slopes=s),
            {"s": torch.ones(2)},
        ),
        "biases": biased,
        "a quantised cache": quantised,
        "scales of a layer": of_layer("sdpa", k_scale=torch.ones(()), v_scale=torch.ones(())),
        "scales of an unquantised layer": lambda: (
            lambda **scales: of_layer("sdpa")()[0](**of_layer("sdpa")()[1] | scales),
            {"k_scale": torch.ones(()), "v_scale": torch.ones(())},
        ),
        **{f"a layer on {name}": of_layer(name) for name in BACKENDS},
        **{f"a prepared step on {name}": prepared(name) for name in BACKENDS},
        **{f"freed after preparing {name}": freed_later(name) for name in BACKENDS},
        **{f"options of {name}": with_options(name) for name in BACKENDS},
        **{f"attention by {name}": public_calls.torch_attend(name) for name in BACKENDS},
    }


def as_tensor(leaf):
    """JAX's and NumPy's arrays as torch tensors, in memory of their own."""
    if isinstance(leaf, jax.Array):
        return to_torch(leaf, copy=True)
    if isinstance(leaf, np.ndarray):
        return torch.tensor(leaf)
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def variants(make, kinds) -> Iterator[tuple[str, Callable, dict]]:
    """A call with each of its tensors in turn of each other kind."""
    function, arguments = make()
    paths, tree = jax.tree_util.tree_flatten_with_path(arguments)
    for number, (path, leaf) in enumerate(paths):
        if not isinstance(leaf, jax.Array | np.ndarray | Tensor) or 0 in leaf.shape:
            continue
        for kind, spoil in kinds.items():
            function, arguments = make()
            given = [as_tensor(x) for x in jax.tree.leaves(arguments)]
            given[number] = spoil(given[number])
            yield f"{jax.tree_util.keystr(path)} {kind}", function, jax.tree.unflatten(tree, given)


def wrong(function, arguments, *, refused: bool) -> str | None:
    """What is wrong with the end of a call, if anything."""
    try:
        function(**arguments)
    except PagedAttentionError:
        return None
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return "it was not refused" if refused else None


def absent(calls) -> Iterator[str]:
    """What is wrong with calls of which one tensor's memory is not there."""
    for name, make in calls.items():
        for kinds, refused in ((FREED, True), (FAKE, False)):
            for place, function, arguments in variants(make, kinds):
                if place.startswith(UNREAD.get(name, "nothing")):
                    continue
                print(f"{name}: {place}", flush=True)
                if text := wrong(function, arguments, refused=refused):
                    yield f"{name}: {place}: {text}"


def transformed(calls) -> Iterator[str]:
    """What is wrong with calls of which one tensor is inside a transform of torch's."""
    for name, make in calls.items():
        for kind, transform in TRANSFORMS.items():
            for place, found in inside(make, kind, transform):
                yield from (f"{name}: {place}: {text}" for text in found)


def inside(make, kind, transform) -> Iterator[tuple[str, list[str]]]:
    for place, function, arguments in variants(make, {kind: Marked}):
        leaves, tree = jax.tree.flatten(arguments)
        number = next(n for n, leaf in enumerate(leaves) if isinstance(leaf, Marked))
        print(place, flush=True)
        found = []

        def call(x, number=number, leaves=leaves, tree=tree, function=function, found=found):
            given = jax.tree.unflatten(tree, [*leaves[:number], x, *leaves[number + 1 :]])
            found.append(wrong(function, given, refused=False))
            return x.sum()

        tensor = leaves[number].as_subclass(Tensor)
        if tensor.is_floating_point() or kind not in DIFFERENTIATING:
            transform(call, tensor)
        yield place, [text for text in found if text]


CALLS = {**public_calls.TORCH, **public_calls.CLASSES, **also()}
PARTS = {
    "core": lambda: absent(public_calls.CORE),
    "torch": lambda: absent(CALLS),
    "transforms": lambda: transformed({n: call for n, call in CALLS.items() if n not in PURE}),
}


def main(part: str) -> None:
    warnings.simplefilter("ignore")
    failures = [*PARTS[part]()]
    print("\n".join(["done", *failures]))
    sys.exit(bool(failures))
