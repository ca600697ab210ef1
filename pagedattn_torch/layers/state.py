"""What an engine keeps between steps: the buffers that captured CUDA graphs read."""

from collections.abc import Mapping
from contextlib import contextmanager
from typing import Any

import torch

from pagedattn import InvalidInputError
from pagedattn._arrays.checks import count, flag
from pagedattn._arrays.inspect import shown

from ..arrays import require_tensors
from .metadata import AttentionMetadata

OWN_BUFFERS = ("slot_mapping", "seq_lens_tensor", "block_tables")
CROSS_BUFFERS = ("encoder_seq_lens_tensor", "cross_slot_mapping", "cross_block_tables")


class AttentionState:
    """The buffers of graph capture, for one model runner.

    While graphs are captured it owns buffers for the largest batch; the metadata of a batch size
    are views of them. A graph captured with that metadata reads whatever is in the buffers when it
    is replayed: `prepare_graph_input_buffers` puts the next step's values there.

    Args:
      runner: has `device`; `graph_block_tables`, an int array `[max_batch_size, max_blocks]`;
        `attn_backend`, a backend class; `max_seq_len_to_capture`; and for encoder-decoder models
        `get_max_block_per_batch()`.

    >>> from types import SimpleNamespace
    >>> from pagedattn_torch import TorchSDPABackend
    >>> tables = torch.zeros(8, 4, dtype=torch.int32)
    >>> runner = SimpleNamespace(device="cpu", graph_block_tables=tables, max_seq_len_to_capture=64,
    ...                          attn_backend=TorchSDPABackend)
    >>> state = AttentionState(runner)
    >>> with state.graph_capture(max_batch_size=8):
    ...     meta = state.graph_capture_get_metadata_for_batch(4)
    >>> meta.block_tables.shape, meta.num_decode_tokens
    (torch.Size([4, 4]), 4)
    """

    def __init__(self, runner: Any):
        self.runner = runner
        self._buffers = None

    @contextmanager
    def graph_capture(self, max_batch_size: int):
        """A context in which graphs of up to `max_batch_size` sequences are captured.

        Raises:
          InvalidInputError: `max_batch_size` is no integer above 0, or `graph_block_tables` has
            fewer rows.
        """
        max_batch_size = count("max_batch_size", max_batch_size)
        on_device = {"device": self.runner.device}
        tables = torch.as_tensor(self.runner.graph_block_tables, **on_device)
        if not max_batch_size <= len(tables):
            raise InvalidInputError(
                f"graph_block_tables must have a row for each of {max_batch_size} sequences, got "
                f"{len(tables)}"
            )
        self._buffers = {
            "slot_mapping": torch.full((max_batch_size,), -1, dtype=torch.int64, **on_device),
            "seq_lens_tensor": torch.ones(max_batch_size, dtype=torch.int32, **on_device),
            "block_tables": tables[:max_batch_size],
        }
        try:
            yield
        finally:
            self._buffers = None

    def graph_clone(self, batch_size: int) -> "AttentionState":
        """The state of one graph: a new one, for the same runner."""
        self._captured()
        return type(self)(self.runner)

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> AttentionMetadata:
        """Metadata of `batch_size` decodes; its tensors are views of the buffers.

        Raises:
          InvalidInputError: no capture is under way, or only one of smaller batches.
        """
        buffers = self._captured()
        largest = len(buffers["slot_mapping"])
        batch_size = count("batch_size", batch_size)
        flag("is_encoder_decoder_model", is_encoder_decoder_model)
        if not batch_size <= largest:
            raise InvalidInputError(f"batch_size must be from 1 to {largest}, got {batch_size}")
        meta = self.runner.attn_backend.make_metadata(
            num_prefills=0,
            num_prefill_tokens=0,
            num_decode_tokens=batch_size,
            max_query_len=1,
            max_decode_query_len=1,
            max_prefill_seq_len=0,
            max_decode_seq_len=self.runner.max_seq_len_to_capture,
            use_cuda_graph=True,
            **{name: buffer[:batch_size] for name, buffer in buffers.items()},
        )
        if is_encoder_decoder_model:
            self._add_cross_buffers(meta, batch_size)
        return meta

    def get_graph_input_buffers(
        self, attn_metadata: AttentionMetadata, is_encoder_decoder_model: bool = False
    ) -> dict[str, Any]:
        """The tensors that a graph captured with the metadata reads, by name."""
        flag("is_encoder_decoder_model", is_encoder_decoder_model)
        if not isinstance(attn_metadata, AttentionMetadata):
            raise InvalidInputError(
                f"attn_metadata must be an AttentionMetadata, got {type(attn_metadata).__name__}"
            )
        names = OWN_BUFFERS + (CROSS_BUFFERS if is_encoder_decoder_model else ())
        return {name: getattr(attn_metadata.decode_metadata, name) for name in names}

    def prepare_graph_input_buffers(
        self,
        input_buffers: dict[str, Any],
        attn_metadata: AttentionMetadata,
        is_encoder_decoder_model: bool = False,
    ) -> None:
        """Copies a step, padded to the size of the graph, to the buffers that the graph reads.

        Raises:
          InvalidInputError: a tensor is not of its buffer's shape; nothing has been copied then.
        """
        step = self.get_graph_input_buffers(attn_metadata, is_encoder_decoder_model)
        has_all = isinstance(input_buffers, Mapping) and step.keys() <= input_buffers.keys()
        if not has_all:
            raise InvalidInputError(
                f"input_buffers must map {[*step]} to tensors, got {shown(input_buffers)}"
            )
        for name, values in step.items():
            _check(name, values, input_buffers[name])
        for name, values in step.items():
            input_buffers[name].copy_(values, non_blocking=True)

    def begin_forward(self, model_input: Any) -> None:
        """Engines call this before each step; there is nothing to do."""

    def _captured(self) -> dict[str, torch.Tensor]:
        if self._buffers is None:
            raise InvalidInputError("expected a capture under way: call it within graph_capture()")
        return self._buffers

    def _add_cross_buffers(self, meta, batch_size):
        """Gives the metadata encoders of one token each, none of them new."""
        columns, like = self.runner.get_max_block_per_batch(), meta.seq_lens_tensor
        meta.encoder_seq_lens_tensor = torch.ones_like(like)
        meta.max_encoder_seq_len = self.runner.max_seq_len_to_capture
        meta.num_encoder_tokens = 0
        meta.cross_slot_mapping = like.new_zeros(0)
        meta.cross_block_tables = like.new_zeros(batch_size, columns)


def _check(name, values, buffer):
    require_tensors(**{f"the buffer {name}": buffer})
    if values is None or values.shape != buffer.shape:
        got = None if values is None else list(values.shape)
        raise InvalidInputError(
            f"{name} must be padded to the graph's {list(buffer.shape)}, got {got}"
        )
