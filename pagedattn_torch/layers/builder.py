"""Makes a step's metadata from what vLLM's model runners have gathered of its sequences."""

import itertools
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pagedattn.batch.indices import PAD_SLOT

from .metadata import AttentionMetadata


class _Sequence(NamedTuple):
    """One sequence of a step, with a slot for each of its new tokens."""

    prompt: bool
    table: Sequence[int]
    slots: list[int]


class MetadataBuilder:
    """Makes the metadata of each step; `AttentionBackend.get_builder_cls` has that of a backend.

    Args:
      input_builder: has `runner.device`, and what is gathered of a step: `input_data`, as vLLM's
        CPU runner has it; or `inter_data_list`, `chunked_prefill_enabled`, `sliding_window` and
        `block_size`, as its GPU runner, with `runner.graph_block_tables` for captured graphs.

    >>> from types import SimpleNamespace as Of
    >>> from pagedattn_torch import TorchSDPABackend
    >>> step = Of(num_prefills=1, num_prefill_tokens=3, num_decode_tokens=1, max_decode_seq_len=5,
    ...           slot_mapping=[0, 1, 2, 8], prefill_block_tables=[[0]],
    ...           decode_block_tables=[[1, 2]], multi_modal_inputs_list=[])
    >>> runner = Of(device="cpu")
    >>> builder = TorchSDPABackend.make_metadata_builder(Of(runner=runner, input_data=step))
    >>> builder.build([3, 5], [3, 1], -1, -1).block_tables
    tensor([[0, 0],
            [1, 2]], dtype=torch.int32)
    """

    metadata_cls: ClassVar[type[AttentionMetadata]]

    def __init__(self, input_builder: Any):
        self.input_builder = input_builder

    def prepare(self) -> None:
        """Engines call this before each step; there is nothing to do."""

    def build(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        cuda_graph_pad_size: int = -1,
        batch_size: int = -1,
    ) -> AttentionMetadata:
        """The metadata of the sequences that are gathered now, prefills first.

        Args:
          seq_lens: with those of padding sequences, in a captured graph.
          query_lens: without.
          cuda_graph_pad_size: how many padding sequences there are; -1 says that no graph runs.
          batch_size: the number of sequences with them.
        """
        source = self.input_builder
        step = _of_cpu(source.input_data) if hasattr(source, "input_data") else _of_gpu(source)
        in_graph, tables = cuda_graph_pad_size != -1, step.tables
        width = max(map(len, tables), default=0)
        if in_graph:
            step.slots += [PAD_SLOT] * cuda_graph_pad_size
            step.counts["num_decode_tokens"] = batch_size
            tables = [*tables, *[[]] * (batch_size - len(tables))]
            width = source.runner.graph_block_tables.shape[1]
        starts = [0, *itertools.accumulate(query_lens)]
        on_device = {"device": source.runner.device}
        return self.metadata_cls(
            **step.counts,
            slot_mapping=torch.tensor(step.slots, dtype=torch.int64, **on_device),
            seq_lens=list(seq_lens),
            seq_lens_tensor=torch.tensor(seq_lens, dtype=torch.int32, **on_device),
            query_start_loc=torch.tensor(starts, dtype=torch.int32, **on_device),
            block_tables=_padded(tables, width).to(**on_device),
            max_query_len=max(query_lens, default=0),
            use_cuda_graph=in_graph,
            multi_modal_placeholder_index_maps=_index_maps(step.maps),
            enable_kv_scales_calculation=True,
        )


def _of_cpu(data) -> SimpleNamespace:
    """What a CPU runner has gathered, lists of the step already."""
    names = ("num_prefills", "num_prefill_tokens", "num_decode_tokens")
    tables = [row or [] for row in (*data.prefill_block_tables, *data.decode_block_tables)]
    return SimpleNamespace(
        counts={name: getattr(data, name) for name in names},
        slots=list(data.slot_mapping),
        tables=tables,
        maps=[data.multi_modal_placeholder_maps] if data.multi_modal_inputs_list else [],
    )


def _of_gpu(source) -> SimpleNamespace:
    """What a GPU runner has gathered, by groups of sequences."""
    groups = source.inter_data_list
    seqs = [seq for group in groups for seq in _sequences(group, source)]
    prompts = [seq for seq in seqs if seq.prompt]
    return SimpleNamespace(
        counts={
            "num_prefills": len(prompts),
            "num_prefill_tokens": sum(len(seq.slots) for seq in prompts),
            "num_decode_tokens": sum(len(seq.slots) for seq in seqs if not seq.prompt),
        },
        slots=[slot for seq in seqs for slot in seq.slots],
        tables=[seq.table for seq in seqs],
        maps=[group.multi_modal_placeholder_maps for group in groups
              if getattr(group, "multi_modal_placeholder_maps", None)],
    )  # fmt: skip


def _sequences(group, source) -> Iterator[_Sequence]:
    columns = zip(
        group.seq_ids, group.input_tokens, group.orig_seq_lens, group.context_lens,
        group.curr_sliding_window_blocks, strict=True,
    )  # fmt: skip
    for seq_id, tokens, seq_len, context_len, last_blocks in columns:
        blocks = group.block_tables and group.block_tables[seq_id]
        read = source.chunked_prefill_enabled or not group.is_prompt or group.prefix_cache_hit
        table = blocks if blocks and read else []
        table = table[-last_blocks:] if last_blocks and not group.prefix_cache_hit else table
        first = context_len
        if group.is_prompt and source.sliding_window is not None:
            first = max(first, seq_len - source.sliding_window)
        slots = [PAD_SLOT] * len(tokens)
        if blocks:
            slots = [PAD_SLOT] * (first - context_len)
            slots += _slots(blocks, range(first, seq_len), source.block_size)
        yield _Sequence(group.is_prompt, table, slots)


def _slots(blocks: Sequence[int], positions: range, block_size: int) -> list[int]:
    return [blocks[p // block_size] * block_size + p % block_size for p in positions]


def _padded(tables: Sequence[Sequence[int]], width: int) -> Tensor:
    padded = torch.zeros(len(tables), width, dtype=torch.int32, device="cpu")
    for row, blocks in zip(padded, tables, strict=True):
        row[: len(blocks)] = torch.tensor(list(blocks), dtype=torch.int32, device="cpu")
    return padded


def _index_maps(maps) -> dict[str, Any]:
    """The maps of all groups as one for each modality."""
    joined: dict[str, Any] = {}
    for modality, placeholders in itertools.chain(*(each.items() for each in maps)):
        joined.setdefault(modality, type(placeholders)()).extend(placeholders)
    return {modality: placeholders.index_map() for modality, placeholders in joined.items()}
