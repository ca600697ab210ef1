"""What is known of an attention call before its values: sizes, dtype, device, options.

Backends are chosen by these facts, and launched with them.
"""

from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

from .._arrays.devices import device_of, strides_of
from .._arrays.inspect import dtype_name
from .._arrays.memory import is_fake
from .._arrays.namespace import cdiv
from .._arrays.typing import TorchTensor
from ..cache.packing import columns, meant_dtype
from ..cache.quantise import of_tokens
from ..spec import AttentionSpec, set_options
from .crossings import Crossings
from .options import facts_of


class Strides(NamedTuple):
    """How arrays lie in memory: elements from one index of an axis to the next, for each axis.

    value is empty where a latent cache has none.
    """

    query: tuple[int, ...]
    key: tuple[int, ...]
    value: tuple[int, ...]


class Layer(NamedTuple):
    """The facts of a layer's own arrays, the query and the cache, that a call depends on.

    Shapes are in columns, however many a byte holds. value is the shape and dtype of the cache's
    value; None where a latent cache has none.
    """

    query_shape: tuple[int, ...]
    cache_shape: tuple[int, ...]
    value: tuple[tuple[int, ...], str] | None
    dtype: str
    device: str
    strides: Strides
    cache_dtype: str | None
    token_scales: bool
    value_dim: int | None
    fake_tensors: bool


def layer_of(query, cache) -> Layer:
    """The facts of a layer's arrays, which may be traced."""
    dtype, cache_dtype = dtype_name(query.dtype), dtype_name(meant_dtype(cache.key.dtype))
    value = cache.value
    strides = *map(strides_of, (query, *cache.planes)), ()
    with_elements = cache.key if 0 in query.shape else query  # all have memory, or none
    held = None
    if value is not None:
        held = (*value.shape[:3], columns(value)), dtype_name(meant_dtype(value.dtype))
    return Layer(
        query_shape=tuple(query.shape),
        cache_shape=(*cache.key.shape[:3], columns(cache.key)),
        value=held,
        dtype=dtype,
        device=device_of(query),
        strides=Strides(*strides[:3]),
        cache_dtype=None if cache_dtype == dtype else cache_dtype,
        token_scales=of_tokens(cache.key_scale),
        value_dim=value_dim_of(cache),
        fake_tensors=isinstance(query, TorchTensor) and is_fake(with_elements),
    )


def value_dim_of(cache) -> int | None:
    """The columns of the values; None where those are a plane like the keys."""
    if cache.value is None:
        return cache.value_dim
    if cache.value.shape[-1] == cache.key.shape[-1]:
        return None
    return columns(cache.value)


ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Call:
    """The sizes, device, strides and options of one call, without its values; hashable.

    The same for JAX and torch. Whatever follows from these facts is a property here, so that all
    backends agree on it.

    >>> call = Call(num_tokens=5, num_heads=8, num_kv_heads=2, head_dim=64, num_blocks=9,
    ...             block_size=4, num_seqs=2, max_blocks=3, max_query_len=4, dtype="bfloat16",
    ...             device="cpu", strides=Strides((), (), ()), spec=AttentionSpec(sliding_window=5))
    >>> call.group, call.capacity, call.max_keys, call.set_options
    (4, 12, 8, ('sliding_window',))
    """

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    num_seqs: int
    max_blocks: int  # entries of a row of the block tables
    max_query_len: int
    dtype: str
    device: str  # "cpu", "cuda", "xpu", "tpu", ...
    strides: Strides
    spec: AttentionSpec
    # From here on, what a cache or a caller may ask for beside the spec: options.
    cache_dtype: str | None = None  # that of a quantised cache; None: the cache is of `dtype`
    token_scales: bool = False  # whether a quantised cache has per-token scales; int4 has always
    value_dim: int | None = None  # columns of the values, if the cache is latent or not head_dim
    fake_tensors: bool = False  # torch's that have no memory: fake, functional, meta, wrapped ones
    sinks: bool = False  # whether the call brings them
    bias: tuple[int, ...] | None = None  # its shape, if the call brings one
    selection: tuple[int, ...] | None = None  # the shape of its blocks, if the call brings one
    return_lse: bool = False
    batch_invariant: bool = False  # whether the bits of a token's results follow from it alone
    parents: bool = False  # whether the batch has draft trees
    # No option: what `slower_because` compares the sizes with.
    crossings: Crossings = field(default=Crossings(), metadata={"option": False})

    @property
    def set_options(self) -> tuple[str, ...]:
        """The options that the spec or the caller set to something else than their default."""
        return (*set_options(self.spec), *(name for name in KEYWORDS if getattr(self, name)))

    @property
    def is_empty(self) -> bool:
        """Whether the shapes leave no query that could see a key."""
        return 0 in (self.num_tokens, self.num_seqs, self.max_blocks, self.num_blocks)

    @cached_property
    def out_dim(self) -> int:
        """Columns of the values, and of out."""
        return self.value_dim or self.head_dim

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return self.num_tokens, self.num_heads, self.out_dim

    @property
    def lse_shape(self) -> tuple[int, int]:
        return self.num_tokens, self.num_heads

    @property
    def layer(self) -> Layer:
        value_shape = (*self.cache_shape[:3], self.out_dim)
        return Layer(
            query_shape=(self.num_tokens, self.num_heads, self.head_dim),
            cache_shape=self.cache_shape,
            value=(value_shape, self.cache_dtype or self.dtype) if self.strides.value else None,
            dtype=self.dtype,
            device=self.device,
            strides=self.strides,
            cache_dtype=self.cache_dtype,
            token_scales=self.token_scales,
            value_dim=self.value_dim,
            fake_tensors=self.fake_tensors,
        )

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """The shape of the cache's key, in columns."""
        return self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim

    @cached_property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def itemsize(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def adds_to_logits(self) -> bool:
        """Whether the logits get more than a mask added: such sums need float32."""
        return self.spec.alibi_slopes is not None or self.bias is not None

    @cached_property
    def scale(self) -> float:
        """The factor on the dot product."""
        return self.spec.scale_for(self.head_dim)

    @property
    def longest_query(self) -> int:
        """The most tokens that one sequence can bring."""
        return max(1, min(self.max_query_len, self.num_tokens))

    @cached_property
    def capacity(self) -> int:
        """Tokens that a row of the block tables holds: no sequence has more keys."""
        return self.max_blocks * self.block_size

    @cached_property
    def num_listed(self) -> int:
        """Blocks of a sequence that a KV head may attend to: all, or those of a selection."""
        if self.selection is None:
            return self.max_blocks
        return min(self.selection[2], self.max_blocks)

    @cached_property
    def window(self) -> int | None:
        """The sliding window; None also where it is too wide to hide anything.

        No query stands further behind a key than the first key is behind the last one, and none of
        cross attention further before a key than its sequence's last query.
        """
        widest = self.capacity if self.spec.causal else max(self.capacity, self.longest_query)
        window = self.spec.sliding_window
        return None if window is None or window >= widest else window

    @property
    def max_keys(self) -> int:
        """The most keys that the queries of one sequence see together.

        The last of them is at the last key, so a window shows no more without causality.
        """
        most = self.num_listed * self.block_size
        if self.window is None:
            return most
        return min(most, self.longest_query + self.window - 1)

    @property
    def visible_blocks(self) -> int:
        """The most blocks that `max_keys` adjacent keys are in, wherever in a block they begin."""
        return min(self.max_blocks, cdiv(self.max_keys - 1, self.block_size) + 1)


# The options that are no field of the spec.
KEYWORDS = tuple(
    field.name
    for field in fields(Call)
    if field.default is not MISSING and field.metadata.get("option", True)
)


def call_of(
    query,
    cache,
    batch,
    spec: AttentionSpec,
    return_lse: bool = False,
    batch_invariant: bool = False,
    **given,
) -> Call:
    """The call of arrays that `validate.attention` has accepted; they may be traced.

    Those given beside query and cache are named by the keywords of `paged_attention`.
    """
    layer = layer_of(query, cache)
    num_tokens, num_heads, head_dim = layer.query_shape
    num_blocks, block_size, num_kv_heads, _ = layer.cache_shape
    return Call(
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_blocks=num_blocks,
        block_size=block_size,
        num_seqs=batch.num_seqs,
        max_blocks=batch.max_blocks,
        max_query_len=batch.max_query_len,
        dtype=layer.dtype,
        device=layer.device,
        strides=layer.strides,
        spec=spec,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
        cache_dtype=layer.cache_dtype,
        token_scales=layer.token_scales,
        value_dim=layer.value_dim,
        fake_tensors=layer.fake_tensors,
        parents=batch.tree is not None,
        **facts_of(given),
    )
