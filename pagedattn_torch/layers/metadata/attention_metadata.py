"""The class of a step's metadata: its sequences, as layers take them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, Self

from torch import Tensor

from pagedattn import AttentionSpec, BatchMetadata, InvalidInputError
from pagedattn._arrays.checks import count, int_array
from pagedattn._arrays.inspect import shown
from pagedattn.batch.make_batch import Lengths

from ...arrays import signed, tensor
from ...uncompiled import require_eager
from ..attention_type import AttentionType
from . import advance, batches, by_type, parts
from .bias_fields import FIELDS as BIAS_FIELDS
from .derivation import check_counts, decoder_side, encoder_side
from .derived import all_of, derived, refresh
from .engine_forms import in_one_meaning


@derived
@dataclass(kw_only=True, eq=False)
class AttentionMetadata:
    """A packed step: prefills first, then decodes; with encoder fields also encoders and cross.

    Sequence s has `seq_lens[s]` tokens, and the last `query_len` of them are new; tokens are packed
    in the order of the sequences. Fields that are not given are derived from those that are; given
    fields that say the same thing must agree. When a field is assigned, or what it holds changed,
    the fields that follow from it are derived again at the next read of any field, which raises on
    contradictions; layers, batches and halves notice it.

    The first layer of a step leaves what it worked out from the fields to those that are like it,
    here, until a field is given. On a GPU changes within a tensor are noticed if torch makes them:
    after others, such as those of another library's kernel, assign the field.

    Tensors may be of any framework and are taken by DLPack. Lengths on a GPU are not read, so the
    lists `seq_lens` and `encoder_seq_lens` stay None if only such tensors are given: give both
    forms if you have both.

    Args:
      num_prefills: sequences of the first kind, whose new tokens are `seq_len - context_len`.
      num_prefill_tokens: their new tokens.
      num_decode_tokens: new tokens of the other sequences, the decodes: one each, unless
        query_start_loc says otherwise.
      slot_mapping: the slot each token is written to, -1 for none; tokens past the last sequence
        are padding. None if there is no cache.
      seq_lens, seq_lens_tensor: tokens of each sequence, the new ones included. A padding
        sequence has length 0.
      block_tables: int `[num_seqs, max_blocks]`; empty or None if there is no cache, or for
        prompts without a context. A prompt without a context may have any row; the row of another
        prefill may lack the blocks that hold only new tokens.
      context_lens_tensor: tokens of each sequence that are cached already, 0 by default.
      query_start_loc: int `[num_seqs + 1]`, where each sequence's tokens start and the last end.
      max_query_len, max_decode_query_len, max_prefill_seq_len, max_decode_seq_len: upper bounds.
      is_prompt: whether all sequences are prefills.
      use_cuda_graph: whether padding sequences fill the decodes up to the size of a captured graph.
        They bring no tokens, query_start_loc and context_lens_tensor may lack their entries, and
        num_decode_tokens counts their padding tokens.
      encoder_seq_lens, encoder_seq_lens_tensor: encoder tokens of each sequence.
      encoder_query_start_loc: where each sequence's encoder tokens of this step start in their own
        packed axis. By default the first sequences bring theirs, `num_encoder_tokens` in all.
      encoder_seq_start_loc: where each sequence's encoder tokens would start if all were packed.
      max_encoder_seq_len: an upper bound on encoder_seq_lens.
      num_encoder_tokens: encoder tokens of this step.
      cross_slot_mapping: the slot of each encoder token of this step.
      cross_block_tables: the blocks of each sequence's encoder keys; empty if all encoder tokens
        come in this step.
      attn_bias, encoder_attn_bias, cross_attn_bias: the biases of `set_attn_bias`.
      seqlen_q, max_seqlen: of a step of prompts alone, as query_start_loc and max_query_len.
      chunked_prefill: not None says that seq_lens, query_start_loc, kv_start_loc, max_query_len,
        max_kv_len and prefill_block_tables may be of the prefills alone, and seq_lens_tensor and
        block_tables of the decodes, if there are any. They are joined.
      multi_modal_placeholder_index_maps, enable_kv_scales_calculation: kept, but not used.

    Raises:
      InvalidInputError: fields contradict each other, or have wrong shapes or dtypes.

    >>> import torch
    >>> meta = AttentionMetadata(num_prefills=1, num_prefill_tokens=3, num_decode_tokens=1,
    ...                          slot_mapping=torch.tensor([0, 1, 2, 8]), seq_lens=[3, 5],
    ...                          block_tables=torch.tensor([[0, 0], [1, 2]]))
    >>> meta.query_start_loc.tolist(), meta.decode_metadata.seq_lens
    ([0, 3, 4], [5])
    """

    num_prefills: int
    num_prefill_tokens: int
    num_decode_tokens: int
    slot_mapping: Any = None
    seq_lens: list[int] | None = None
    seq_lens_tensor: Any = None
    block_tables: Any = None
    context_lens_tensor: Any = None
    query_start_loc: Any = None
    seq_start_loc: Any = None
    max_query_len: int | None = None
    max_decode_query_len: int | None = None
    max_prefill_seq_len: int | None = None
    max_decode_seq_len: int | None = None
    is_prompt: bool | None = None
    use_cuda_graph: bool = False
    encoder_seq_lens: list[int] | None = None
    encoder_seq_lens_tensor: Any = None
    encoder_query_start_loc: Any = None
    encoder_seq_start_loc: Any = None
    max_encoder_seq_len: int | None = None
    num_encoder_tokens: int | None = None
    cross_slot_mapping: Any = None
    cross_block_tables: Any = None
    attn_bias: list[Tensor] | None = None
    encoder_attn_bias: list[Tensor] | None = None
    cross_attn_bias: list[Tensor] | None = None
    seqlen_q: Any = None
    max_seqlen: int | None = None
    chunked_prefill: bool | None = None
    max_kv_len: int | None = None
    kv_start_loc: Any = None
    prefill_block_tables: Any = None
    multi_modal_placeholder_index_maps: dict[str, Any] | None = None
    enable_kv_scales_calculation: bool = False

    def __post_init__(self) -> None:
        all_of(self)

    @staticmethod
    def _derive(given: dict[str, Any]) -> dict[str, Any]:
        """All fields, derived from the given ones."""
        require_eager()
        arrays = {name: _field(name, given[name]) for name in _TENSORS}
        whole = SimpleNamespace(**given | arrays)
        for side in (check_counts, in_one_meaning, decoder_side, encoder_side):
            vars(whole).update(side(whole))
        return vars(whole)

    @classmethod
    def from_batch(
        cls,
        batch: BatchMetadata,
        *,
        encoder: BatchMetadata | None = None,
        num_prefills: int | None = None,
        num_prefill_tokens: int | None = None,
    ) -> Self:
        """The metadata of a batch of JAX or torch arrays, which are not copied.

        Args:
          batch: the decoder's tokens.
          encoder: the encoder tokens of the same sequences. A sequence that is not encoded in this
            step has no new tokens in it, but has its length and its row of the table.
          num_prefills, num_prefill_tokens: how many sequences count as prefills, and their tokens.
            By default all up to the last one with several tokens; finding that one reads the
            lengths, which waits for a GPU.

        >>> from pagedattn import make_batch
        >>> batch = make_batch([3, 1], [0, 4], [[0], [1, 2]], block_size=4)
        >>> AttentionMetadata.from_batch(batch).num_prefill_tokens
        3
        """
        fields = batches.decoder_fields(batch, num_prefills, num_prefill_tokens)
        return cls(**fields, **({} if encoder is None else batches.encoder_fields(encoder)))

    @classmethod
    def from_lists(
        cls,
        query_lens: Lengths,
        context_lens: Lengths,
        block_tables: Sequence[Lengths],
        *,
        block_size: int,
        encoder_lens: Lengths | None = None,
        cross_block_tables: Sequence[Lengths] | None = None,
    ) -> Self:
        """From lists with one entry a sequence, prefills first, as `make_batch` takes them.

        With `encoder_lens` and `cross_block_tables`, sequences without a context bring their
        encoder tokens in this step; the encoder tokens of the others are in the cache.

        >>> meta = AttentionMetadata.from_lists([3, 1], [0, 4], [[0], [1, 2]], block_size=4)
        >>> meta.slot_mapping.tolist(), meta.seq_lens
        ([0, 1, 2, 8], [3, 5])
        """
        return cls(
            **batches.fields_of_lists(
                query_lens,
                context_lens,
                block_tables,
                block_size=block_size,
                encoder_lens=encoder_lens,
                cross_block_tables=cross_block_tables,
            )
        )

    def to_batch(
        self, block_size: int, attn_type: AttentionType | str = AttentionType.DECODER
    ) -> BatchMetadata:
        """The batch that `paged_attention` takes: int32 tensors; int32 fields are not copied.

        Encoders have no paged keys: their batch is over packed tokens, as blocks of one token.

        Raises:
          InvalidInputError: fields that this type needs are missing or do not fit together.
        """
        block_size = count("block_size", block_size)
        attn_type = AttentionType.of(attn_type)
        refresh(self)
        if attn_type.cached:
            return batches.paged(self, block_size, attn_type)
        return batches.packed(self, attn_type)

    @property
    def prefill_metadata(self) -> Self | None:
        """The prefills alone; None if there are none."""
        refresh(self)
        return type(self)(**parts.prefills(self)) if self.num_prefills else None

    @property
    def decode_metadata(self) -> Self | None:
        """The decodes alone, with the padding; None if there are none."""
        refresh(self)
        return type(self)(**parts.decodes(self)) if self.num_decode_tokens else None

    @property
    def is_all_encoder_attn_metadata_set(self) -> bool:
        """Whether all fields are known that attention of type ENCODER needs."""
        return not batches.missing(self, AttentionType.ENCODER, paged=False)

    @property
    def is_all_cross_attn_metadata_set(self) -> bool:
        """Whether all fields are known that ENCODER_DECODER needs to write keys and to attend."""
        cross = (self.cross_slot_mapping, self.cross_block_tables)
        return self.is_all_encoder_attn_metadata_set and all(field is not None for field in cross)

    def num_query_tokens(self, attn_type: AttentionType | str) -> int:
        """Rows of the query that a forward of this type expects, padding included."""
        return by_type.num_query_tokens(self, AttentionType.of(attn_type))

    def get_seq_lens(self, attn_type: AttentionType | str) -> tuple[list[int], list[int]]:
        """The number of queries and of keys of each sequence.

        Raises:
          InvalidInputError: fields that this type needs are missing, or are only on a GPU.

        >>> meta = AttentionMetadata.from_lists([3, 1], [2, 4], [[0, 3], [1, 2]], block_size=4)
        >>> meta.get_seq_lens("decoder")
        ([3, 1], [5, 5])
        """
        refresh(self)
        return by_type.seq_lens(self, AttentionType.of(attn_type))

    def set_attn_bias(self, attn_bias: list[Tensor] | None, attn_type: AttentionType | str) -> None:
        """Gives layers of a type a bias, in place of their causality, windows and ALiBi.

        DECODER and ENCODER_ONLY share one. What was prepared is discarded.

        Args:
          attn_bias: for each sequence, or for each prefill, what is added to the logits of its new
            tokens: `[query_len, key_len]` or `[num_heads, query_len, key_len]`, with any axes of 1
            in front; -inf where a token does not see a key, or bool, False there. Or a mask of
            xFormers for a sequence, or one for all. None in the list, and what it lacks, leaves a
            sequence to the layer's own masks. None in its place takes all away.

        >>> import torch
        >>> meta = AttentionMetadata.from_lists([2], [0], [[0]], block_size=4)
        >>> meta.set_attn_bias([torch.zeros(2, 2)], "decoder")  # both tokens see each other
        >>> meta.get_attn_bias("decoder")
        [tensor([[0., 0.],
                [0., 0.]])]
        """
        setattr(self, BIAS_FIELDS[AttentionType.of(attn_type)], attn_bias)

    def get_attn_bias(
        self, attn_type: AttentionType | str, spec: AttentionSpec = AttentionSpec()
    ) -> list[Tensor]:
        """What is added to the logits of each sequence; computed at each call unless one was set.

        Returns:
          what `set_attn_bias` was given; or for each sequence the bias of the spec, but with the
          causality of the type: float32 `[query_len, key_len]`, with ALiBi
          `[num_heads, query_len, key_len]`.

        >>> meta = AttentionMetadata.from_lists([2], [1], [[0]], block_size=4)
        >>> meta.get_attn_bias("decoder")
        [tensor([[0., 0., -inf],
                [0., 0., 0.]])]
        """
        refresh(self)
        return by_type.attn_bias(self, AttentionType.of(attn_type), spec)

    def get_seq_len_block_table_args(
        self, attn_type: AttentionType | str, *, is_prompt: bool
    ) -> tuple[Tensor | None, int | None, Tensor | None]:
        """(lengths of the keys, the bound on them, block tables), of prompts or of decodes.

        The tables are None for encoders: their keys are not paged.
        """
        refresh(self)
        return by_type.keys(self, AttentionType.of(attn_type), is_prompt)

    def get_num_prefill_decode_query_kv_tokens(
        self, attn_type: AttentionType | str
    ) -> tuple[int, int, int]:
        """(new queries of prefills, new keys of prefills, new queries of decodes), in tokens."""
        return by_type.num_tokens(self, AttentionType.of(attn_type))

    def advance_step(
        self,
        model_input: Any,
        sampled_token_ids: Tensor | None,
        block_size: int,
        num_seqs: int,
        num_queries: int,
        turn_prefills_into_decodes: bool = False,
    ) -> None:
        """Makes this the metadata of the next step, in place: a decode of one token each.

        Its tensors, and those of the model's input, keep their memory; nothing waits for a GPU.

        Args:
          model_input: has `input_tokens` and `input_positions`, which get the sampled tokens and
            their positions.
          sampled_token_ids: one for each of the first `num_queries` sequences, in any shape; None
            leaves `input_tokens`.
          block_size: of the block tables, which must have the blocks of the next tokens.
          num_seqs: all sequences; those behind `num_queries` are a captured graph's padding.
          turn_prefills_into_decodes: whether prefills become decodes.

        Raises:
          InvalidInputError: other numbers of sequences, prefills, no table or one without the
            next block; nothing has been changed then.

        >>> import torch
        >>> from types import SimpleNamespace
        >>> meta = AttentionMetadata.from_lists([1, 1], [2, 3], [[5], [0, 7]], block_size=4)
        >>> tokens, positions = torch.tensor([8, 9]), torch.tensor([2, 3])
        >>> model_input = SimpleNamespace(input_tokens=tokens, input_positions=positions)
        >>> meta.advance_step(model_input, torch.tensor([[1], [2]]), 4, 2, 2)
        >>> meta.seq_lens, meta.slot_mapping.tolist(), tokens.tolist(), positions.tolist()
        ([4, 5], [23, 28], [1, 2], [3, 4])
        """
        advance.check(self, num_seqs, num_queries, turn_prefills_into_decodes)
        advance.advance(self, model_input, sampled_token_ids, block_size, num_seqs, num_queries)

    def asdict_zerocopy(self, skip_fields: Collection[str] | None = None) -> dict[str, Any]:
        """The fields by name, tensors shared; without those of `skip_fields`, names.

        Raises:
          InvalidInputError: `skip_fields` is neither a collection of names nor None.
        """
        skipped = () if skip_fields is None else skip_fields
        if not isinstance(skipped, Collection):
            raise InvalidInputError(
                f"skip_fields must be a set or a list of names of fields, got {shown(skip_fields)}"
            )
        names = (field.name for field in fields(self) if field.name not in skipped)
        return {name: getattr(self, name) for name in names}


_TENSORS = tuple(field.name for field in fields(AttentionMetadata) if field.type is Any)


def _field(name, array) -> Tensor | None:
    if array is None:
        return None
    field = signed(tensor(name, array))
    if field.numel():
        int_array(name, field, 2 if name.endswith("block_tables") else 1)
    return field
