"""The fields of metadata that hold biases."""

from torch import Tensor

from pagedattn import InvalidInputError
from pagedattn._arrays.inspect import shown

from ..attention_type import AttentionType

FIELDS = {
    AttentionType.DECODER: "attn_bias",
    AttentionType.ENCODER_ONLY: "attn_bias",
    AttentionType.ENCODER: "encoder_attn_bias",
    AttentionType.ENCODER_DECODER: "cross_attn_bias",
}


def check_lists(meta) -> None:
    """Requires something with an entry for each sequence: a list, or a tensor."""
    for name in sorted({*FIELDS.values()}):
        given = getattr(meta, name)
        several = isinstance(given, list | tuple) or (isinstance(given, Tensor) and given.ndim)
        if given is not None and not several:
            raise InvalidInputError(
                f"{name} must be a list of tensors, one for each sequence, got {shown(given)}"
            )
