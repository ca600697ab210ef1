"""What `attention_kernel` takes, in groups with names.

Arrays are one argument and constants another. Numbers that change from call to call are arguments
of their own. In a tuple, Triton would specialise on them, although `do_not_specialize` names it: a
new length or size that is 1 or a multiple of 16 would compile another program. And a launch costs
less than with 56 arguments: 20 us of Python instead of 26.
"""

from typing import Any, NamedTuple

from .widths import Widths


class Arrays(NamedTuple):
    """What the kernel reads."""

    query: Any  # [num_tokens, num_kv_heads * group, head_dim]
    key: Any  # [num_blocks, block_size, num_kv_heads, head_dim]; of any dtype
    value: Any  # [num_blocks, block_size, num_kv_heads, value_dim]; any array when latent
    block_tables: Any  # i32 [num_seqs, max_blocks]; of a selection, see `listed_blocks` in lists.py
    seq_lens: Any  # i32 [num_seqs]
    query_start_loc: Any  # i32 [num_seqs + 1]
    alibi_slopes: Any  # f32 [num_heads]; any array without ALiBi
    depths: Any  # i32 [num_tokens], of a `DraftTree`; any array without one
    ancestors: Any  # i32 [num_tokens, words]; any array without a tree
    sinks: Any  # f32 [num_heads]; any array without sinks
    key_scale: Any  # of tokens or f32 of heads, as `KVCache` has them; any array without
    value_scale: Any  # the same; of a latent cache the keys'
    selection: Any  # i32 [num_seqs, num_kv_heads, num_listed]; any array without a selection


class Results(NamedTuple):
    """What the kernel writes."""

    out: Any  # [splits, num_tokens, num_heads, value_dim]
    lse: Any  # f32 [splits, num_tokens, num_heads]; of segments, see `store_part` in segments.py


class Parts(NamedTuple):
    """What `join_kernel` reads."""

    out: Any  # as `Results`
    lse: Any
    value_scale: Any  # as `Arrays`


class Scalars(NamedTuple):
    """Numbers that a program takes. Strides are in units of `Layout.stride_unit` elements."""

    scale: float  # on the dot product, never negative; includes 1 / cap or log2(e)
    cap: float  # of the logits, 0 without one; includes log2(e), but not with ALiBi
    window: int
    num_tokens: int
    num_seqs: int
    num_kv_heads: int
    num_blocks: int
    max_blocks: int
    table_stride: int  # of the rows of the block tables, in elements; of a selection, num_listed
    query_token_stride: int
    query_head_stride: int
    block_stride: int
    slot_stride: int
    head_stride: int
    value_block_stride: int
    value_slot_stride: int
    value_head_stride: int
    key_scale_stride: int = -1  # of per-head scales: 1; 0 of one number for all, -1 of none
    value_scale_stride: int = -1


class Layout(NamedTuple):
    """How the cache stores keys and values.

    Kernels read fields alone: Triton 3.9 makes other tuples of constants, without their properties.
    """

    block_size: int
    stride_unit: int  # tells the compiler what divides the strides: loads are then wide
    alike: bool  # the values have the keys' strides
    halves: bool  # products are of float16, as eight_bits.py makes it
    pairs: bool  # values are read as pairs of bytes
    nibbles: bool  # a byte holds two numbers
    sums: int  # tiles of columns in which values are summed up: see `State`
    scaled: bool  # tokens have scales, one each for a key and a value
    by_heads: bool  # scales are of heads, or there are none: strides in `Scalars` tell
    small: bool  # offsets in the cache fit into 32 bits, which saves registers
    key_groups: int  # with a scale each, in a key of which a byte holds two columns; else 0
    value_groups: int


class Options(NamedTuple):
    """What the formula has."""

    causal: bool
    window: bool
    soft_cap: bool
    alibi: bool
    sinks: bool
    negate: bool  # the scale is negative
    selection: bool  # keys are counted in the list of a KV head's blocks
    looked_up: bool  # and their positions are looked up, for windows and ALiBi
    words: int  # of a token's ancestors, where drafts branch; 0 where they do not


class TileShape(NamedTuple):
    """The rows that a program computes."""

    heads: int  # query heads of a tile: all of the group if they fit
    tokens: int
    rows: int  # at least tokens * heads
    apart: bool  # more warps than rows for them: they share the keys of a step; see `attend_keys`
    unmasked: bool  # steps that all rows see wholly get a loop without masks


class Config(NamedTuple):
    """What a program is compiled for."""

    widths: Widths
    layout: Layout
    options: Options
    tile: TileShape
    few: TileShape | None  # for tiles with no more tokens than it has, as decodes in a mixed batch
    group: int  # query heads of a KV head, or of all that a program computes
    kv_heads: int  # a program's by int4_decode.py, which count as one elsewhere; 0: another way
    keys: int  # of one step
    tiles_a_seq: int  # tiles given to each sequence; 0 finds the sequence by search
    own_padding: bool  # the sequences' tiles store the rows of padding tokens: no others do
    split: bool  # the grid's second axis splits the keys, for `merge_kernel` or `join_kernel`
    min_steps: int  # steps, or of segments parts, below which keys are not split further
    segment: int  # keys whose steps are joined in order, and then it to others; 0: all together
    part: int  # keys of a state that is stored where they are split: of a segment, or of a step
