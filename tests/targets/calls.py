"""Calls of all kinds that the kernels tell apart, and what is compiled for them."""

import functools
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", minversion="3.5")
from gpus import Gpu

from pagedattn import AttentionSpec, KVCache, Selection, explain, paged_attention, select_backend
from pagedattn._dispatch import registry
from pagedattn._kernels.triton.programs import held
from pagedattn.backends import cudnn, mosaic
from pagedattn.backends import triton as backend
from pagedattn.backends.triton import program
from pagedattn.batch.draft_tree import DraftTree, num_words
from pagedattn.batch.metadata import BatchMetadata
from pagedattn.cache.packing import held_dtype, held_shape
from pagedattn.cache.quantise import scale_dtype, scale_shape

int32, float32 = jnp.int32, jnp.float32


class Attention(NamedTuple):
    """A call: its sizes, dtypes and options."""

    num_seqs: int = 64
    queries: int = 1  # of each sequence
    keys: int = 4096
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    latent: bool = False
    block_size: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str | None = None
    token_scales: bool = False
    spec: AttentionSpec = AttentionSpec()
    sinks: bool = False
    batch_invariant: bool = False
    parents: bool = False
    chosen: int = 0  # blocks of each KV head

    def arrays(self) -> tuple[Any, ...]:
        """query, cache, batch, sinks and a selection, without values."""
        of = jax.ShapeDtypeStruct
        tokens, blocks = self.num_seqs * self.queries, -(-self.keys // self.block_size)
        plane = self.num_seqs * blocks, self.block_size, self.num_kv_heads
        shapes = [(*plane, self.head_dim)]
        shapes += [] if self.latent else [(*plane, self.value_dim or self.head_dim)]
        held = self.cache_dtype or self.dtype
        kinds = zip(("key", "value"), shapes, strict=False)
        arrays = {name: of(held_shape(shape, held), held_dtype(held)) for name, shape in kinds}
        if self.token_scales:
            kinds = zip(("key_scale", "value_scale"), shapes, strict=False)
            arrays |= {
                name: of(scale_shape(shape, held), scale_dtype(held)) for name, shape in kinds
            }
        arrays.setdefault("value", None)
        cache = KVCache(**arrays, value_dim=self.value_dim if self.latent else None)
        lengths = of((self.num_seqs,), int32), of((self.num_seqs + 1,), int32)
        tables = of((self.num_seqs, blocks), int32), *lengths
        tokenwise = of((tokens,), int32), of((tokens,), int32)
        lines = DraftTree(*tokenwise, of((tokens, num_words(self.queries)), int32))
        tree = lines if self.parents else None
        batch = BatchMetadata(*tables, *tokenwise, self.block_size, self.queries, tree=tree)
        query = of((tokens, self.num_heads, self.head_dim), self.dtype)
        sinks = of((self.num_heads,), float32) if self.sinks else None
        blocks = of((self.num_seqs, self.num_kv_heads, self.chosen), int32)
        return query, cache, batch, sinks, Selection(blocks, True) if self.chosen else None


CACHED = (
    *(backend._device, backend.capability, program._capability, program._compiled),
    *(mosaic.launch._capability, cudnn._capability),
    registry.tried,
)


@contextmanager
def on(gpu: Gpu):
    """What the backends ask the machine is answered as a GPU would; nothing is launched."""
    capability, number = gpu.capability, gpu.capability[0] * 10 + gpu.capability[1]
    device = mock.Mock(compute_capability="{}.{}".format(*capability), core_count=gpu.num_sms)
    launcher = mock.Mock(**{"get_compute_capability.return_value": number})
    launcher.TritonKernelCall.return_value.to_proto.return_value = b""
    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *kind: [device])
        patch.setattr(jax, "default_backend", lambda: "gpu")
        patch.setattr(program, "launcher", launcher)
        yield
    forget()


def forget():
    """What was answered, and what was traced, for another machine."""
    for cached in CACHED:
        cached.cache_clear()
    backend.run.clear_cache()


def refusals(call: Attention, backend: str) -> list[str]:
    """Why a backend refuses a call, on the GPU that answers."""
    return traced(lambda *arrays, **options: explain(*arrays, **options)[backend], call)


class Started(NamedTuple):
    programs: list  # that Triton has compiled: attention, and where keys are split their merge
    held: int  # bytes of shared memory that the launch reckoned with for attention


def started(call: Attention) -> Started:
    """What `paged_attention` starts for a call on the GPU that answers."""
    tiling, compiled = backend.tiling, program._compiled
    programs, bytes_held = [], []

    def tile(call, device):
        tiles = tiling(call, device)
        bytes_held.append(held(tiles.program, call, device))
        return tiles

    def compile_one(*described):
        programs.append(compiled(*described))
        return programs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "tiling", tile)
        patch.setattr(program, "_compiled", compile_one)
        traced(functools.partial(paged_attention, backend="triton"), call)
    return Started(programs, *bytes_held)


def started_by(function, *arrays) -> list:
    """The programs that Triton has compiled for a function of arrays without values."""
    compiled, programs = program._compiled, []

    def compile_one(*described):
        programs.append(compiled(*described))
        return programs[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_compiled", compile_one)
        jax.eval_shape(function, *arrays)
    return programs


def chosen(call: Attention) -> str:
    """What `backend=None` takes."""
    return traced(select_backend, call)


def traced(function, call: Attention):
    """What a function returns for a call's arrays while JAX traces it."""
    results = []

    def body(query, cache, batch, sinks, selection):
        options = {"batch_invariant": call.batch_invariant}
        options |= {} if sinks is None else {"sinks": sinks}
        options |= {} if selection is None else {"selection": selection}
        results.append(function(query, cache, batch, call.spec, **options))
        return 0

    jax.eval_shape(body, *call.arrays())
    return results[0]
