"""Metadata from any framework as torch tensors."""

import dataclasses

import torch
from torch import Tensor

from pagedattn import BatchMetadata


def tensor(array, device=None) -> Tensor:
    """A tensor as it is; any other array by DLPack, without a copy on its own device."""
    converted = array if isinstance(array, Tensor) else torch.from_dlpack(array)
    return converted.to(device) if device is not None else converted


def batch_on(batch: BatchMetadata, device) -> BatchMetadata:
    """The batch with its arrays as tensors on a device."""
    arrays = {
        field.name: tensor(getattr(batch, field.name), device)
        for field in dataclasses.fields(batch)
        if not field.metadata.get("static")
    }
    return dataclasses.replace(batch, **arrays)
