"""A layer's attention as engines call it, written once for all backends."""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pagedattn import AttentionSpec, KVCache, UnsupportedError
from pagedattn._dispatch.call import Call, call_of
from pagedattn.cache import validate as validate_cache

from ..arrays import arrays_of, require_no_grad
from ..layout import is_empty, split_heads
from ..step import Step, prepare
from .attention_type import AttentionType
from .biases import packed_bias, under_bias
from .inputs import (
    LayerCall,
    check_counts,
    check_output,
    fresh_keys,
    heads,
    require_metadata,
    require_one_device,
    require_readable,
    require_unit_scales,
    takes_layer,
)
from .metadata import AttentionMetadata
from .metadata.derived import held, refresh
from .plans import Part, plan
from .quantised import as_quantised, cache_dtype, require_quantised
from .settings import (
    check_batch_invariant,
    check_heads,
    check_slopes,
    slopes_of,
    specs_by_type,
)
from .step import ANYWHERE, LayerStep, likeness, shared


class AttentionImpl:
    """One attention layer. A subclass names the backend that it runs; it never takes another.

    Args:
      num_heads, head_size: the number of query heads, and their dimension.
      scale: factor on the dot product; None is `head_size ** -0.5`.
      num_kv_heads: None is `num_heads`.
      alibi_slopes, sliding_window, logits_soft_cap: as in `pagedattn.AttentionSpec`; None is off.
        Without causality windows and ALiBi are symmetric; in cross-attention the last query
        has the position of the last key.
      kv_cache_dtype: "auto", the dtype of the keys; or a quantised one: "fp8" or "fp8_e4m3",
        "fp8_e5m2", "int8". `kv_cache` is then of that dtype or of torch.uint8.
      blocksparse_params: only None.
      attn_type: the type that `forward` computes if it is given none.
      batch_invariant: as in `pagedattn.paged_attention`, for layers of a backend that promises it.

    Fields, which engines print and read: those arguments but the last ones, with `scale` and
    `num_kv_heads` never None and `alibi_slopes` a float32 tensor on the CPU or None;
    `num_queries_per_kv`, and `need_mask`, whether ALiBi or a window hides or weighs keys.

    Raises:
      InvalidInputError: values out of range.
      UnsupportedError: another kv_cache_dtype, one that the backend does not read,
        blocksparse_params, or batch_invariant by a backend that does not promise it.

    >>> from pagedattn_torch import TorchSDPABackendImpl
    >>> layer = TorchSDPABackendImpl(num_heads=8, head_size=16, num_kv_heads=2)
    >>> layer.scale, layer.num_queries_per_kv, layer.need_mask
    (0.25, 4, False)
    """

    backend: ClassVar[str]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        alibi_slopes: Sequence[float] | Tensor | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        blocksparse_params: dict[str, Any] | None = None,
        logits_soft_cap: float | None = None,
        attn_type: AttentionType | str = AttentionType.DECODER,
        batch_invariant: bool = False,
    ):
        self.num_heads: int = num_heads
        self.head_size: int = head_size
        self.num_kv_heads: int = num_heads if num_kv_heads is None else num_kv_heads
        self.attn_type: AttentionType = AttentionType.of(attn_type)
        self.specs: dict[AttentionType, AttentionSpec] = specs_by_type(
            scale, sliding_window, logits_soft_cap, alibi_slopes
        )
        check_heads(self.num_heads, self.num_kv_heads, self.head_size)
        check_slopes(self.specs, self.num_heads)
        self.cache_dtype: torch.dtype | None = cache_dtype(kv_cache_dtype)
        if self.cache_dtype is not None:
            require_quantised(self.backend)
        check_batch_invariant(batch_invariant, self.backend)
        self.batch_invariant: bool = batch_invariant
        spec = self.specs[AttentionType.DECODER]
        self.scale: float = spec.scale_for(head_size)
        self.alibi_slopes: Tensor | None = slopes_of(spec)
        self.sliding_window: int | None = spec.sliding_window
        self.logits_soft_cap: float | None = spec.logits_soft_cap
        self.kv_cache_dtype: str = kv_cache_dtype
        self.num_queries_per_kv: int = self.num_heads // self.num_kv_heads
        self.need_mask: bool = bool(spec.alibi_slopes or spec.sliding_window)
        if blocksparse_params is not None:
            raise UnsupportedError(
                "blocksparse_params must be None: every visible key is attended to"
            )

    @takes_layer
    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | KVCache | None,
        attn_metadata: AttentionMetadata,
        k_scale: float = 1.0,
        v_scale: float = 1.0,
        attn_type: AttentionType | str | None = None,
        output: Tensor | None = None,
    ) -> Tensor:
        """Writes the new keys and values to the cache, then attends: prefills, decodes, any mix.

        Sequences with a context read all their keys, the new ones too, from the cache. Prompts
        without a context read `key` and `value` as they are given; so do encoders, profiling runs
        and calls without block tables.

        Later engines pass their layer, a module, in front of the query. Of it only the scales of
        quantised caches are used, `_k_scale` and `_v_scale`.

        A quantised cache holds keys divided by `k_scale`, and values by `v_scale`, rounded and
        saturating. Prompts then attend to their keys as the cache holds them.

        Args:
          query: `[num_tokens, num_heads * head_size]` or `[num_tokens, num_heads, head_size]`, of
            any strides; further axes in front are taken as one.
          key, value: the same with num_kv_heads; for cross-attention the encoder's. Both None if
            the cache holds them already.
          kv_cache: see `layout`; None or empty in a profiling run. A token of slot -1 is not
            written. Those of a prefill still see each other; if slots are on a GPU, where they are
            not read, and there is a context, only if a window is shorter than a query. A
            decode without a slot reads the cache's old values at its position.
          attn_metadata: the metadata of the step.
          k_scale, v_scale: of a quantised cache, numbers or tensors on its device, one or one for
            each KV head; otherwise 1.0, as numbers or tensors on the CPU.
          attn_type: None takes the layer's.
          output: a tensor to write the result to; None allocates one.

        Returns:
          A tensor of the shape and dtype of query, or `output`.

        Raises:
          InvalidInputError, UnsupportedError: nothing has been written then. Tensors that require
            gradients are unsupported. Where a kernel itself fails, as by lack of memory, the slots
            of this step's tokens may have been written, and no others: the same call may be made
            again.

        >>> import torch
        >>> from pagedattn_torch import TorchSDPABackendImpl, TorchSDPAMetadata
        >>> meta = TorchSDPAMetadata.from_lists([3], [0], [[1]], block_size=4)
        >>> layer = TorchSDPABackendImpl(num_heads=2, head_size=8)
        >>> query = key = value = torch.ones(3, 16)
        >>> layer.forward(query, key, value, torch.zeros(2, 2, 4, 2, 8), meta).shape
        torch.Size([3, 16])
        """
        scales = k_scale, v_scale
        call = self._call(query, key, value, kv_cache, attn_metadata, attn_type, scales)
        check_output(output, call.query)
        make = functools.partial(self._step, call, attn_metadata)
        step = shared(attn_metadata, likeness(self, *call), call.query.device, make)
        result = step.run(call.query, call.fresh, call.cache).reshape(query.shape)
        return result if output is None else output.copy_(result.reshape(output.shape))

    def prepare(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | KVCache | None,
        attn_metadata: AttentionMetadata,
        attn_type: AttentionType | str | None = None,
    ) -> None:
        """Does once what all layers like this one need in a step, and keeps it in the metadata.

        `forward` then only writes and attends, in layers of the same class, formula and sizes, on
        arrays of the same sizes and strides; in others it does everything itself. Values of the
        arrays given here do not matter. Assigning a field of the metadata, or changing what one
        holds, discards what was prepared.

        Without it the first of such layers does the same for the next ones. Layers of a CUDA graph
        share only what was prepared in this way: what they prepare themselves, replays compute
        again. So do layers on several CUDA streams, and with inference tensors on a GPU.

        Args, Raises: as `forward`.

        >>> import torch
        >>> from pagedattn_torch import TorchSDPABackendImpl, TorchSDPAMetadata
        >>> meta = TorchSDPAMetadata.from_lists([3], [0], [[1]], block_size=4)
        >>> layers = [TorchSDPABackendImpl(num_heads=2, head_size=8) for _ in range(4)]
        >>> caches = [torch.zeros(2, 2, 4, 2, 8) for _ in layers]
        >>> x = torch.ones(3, 16)
        >>> layers[0].prepare(x, x, x, caches[0], meta)
        >>> for layer, cache in zip(layers, caches):
        ...     x = layer.forward(x, x, x, cache, meta)
        """
        call = self._call(query, key, value, kv_cache, attn_metadata, attn_type)
        places = held(attn_metadata).setdefault(likeness(self, *call), {})
        places[ANYWHERE] = self._step(call, attn_metadata)

    def _call(
        self, query, key, value, kv_cache, attn_metadata, attn_type, scales=(1.0, 1.0)
    ) -> LayerCall:
        """The arrays of a call, checked, with heads as an axis of their own."""
        kind = self.attn_type if attn_type is None else AttentionType.of(attn_type)
        require_metadata(attn_metadata)
        refresh(attn_metadata)
        rows = heads("query", query, self.num_heads, self.head_size)
        fresh = fresh_keys(key, value, (self.num_kv_heads, self.head_size))
        cache = self._cache(kv_cache, kind, scales)
        require_readable(rows, fresh, cache)
        return LayerCall(kind, rows, fresh, cache)

    def _cache(self, kv_cache, kind, scales) -> KVCache | None:
        """The cache that a call of this kind reads and writes."""
        if self.cache_dtype is None:
            require_unit_scales(k_scale=scales[0], v_scale=scales[1])
        if not kind.cached or is_empty(kv_cache):
            return None
        cache = split_heads(kv_cache, self.num_kv_heads, self.head_size)
        if self.cache_dtype is not None:
            cache = as_quantised(cache, self.cache_dtype, *scales)
            validate_cache.scales(cache)
        require_no_grad(*arrays_of(cache).values())
        return cache

    def _step(self, call: LayerCall, attn_metadata) -> LayerStep:
        """The prepared step of a call. All that can fail fails here, before anything is written.

        What follows from shapes, and so from `likeness`, is checked here alone.
        """
        check_counts(call.query, call.fresh, attn_metadata, call.kind)
        require_one_device(call)
        spec = self.specs[call.kind]
        bias = packed_bias(attn_metadata, call.kind, call.query, spec)
        window = spec.sliding_window if bias is None else None
        parts, rows = plan(call.fresh, call.cache, attn_metadata, call.kind, window)
        parts = [part.with_bias(bias) for part in parts]
        steps = [(part, self._part(call, part)) for part in parts]
        return LayerStep(steps, rows, self.batch_invariant)

    def _part(self, call: LayerCall, part: Part) -> Step:
        arrays = part.arrays(call.query, call.fresh, call.cache)
        spec = self.specs[call.kind] if part.bias is None else under_bias(self.specs[call.kind])
        options = {"batch_invariant": self.batch_invariant, **part.options}
        backend = self.backend_of(call_of(*arrays, part.batch, spec, **options))
        return prepare(*arrays, part.batch, spec, backend=backend, **options)

    def backend_of(self, call: Call) -> str:
        """The name of the backend that runs a part of a call; subclasses may override it."""
        return self.backend
