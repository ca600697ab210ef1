"""The four types of attention that a layer may compute: which tokens attend to which."""

from enum import Enum, StrEnum

from pagedattn import InvalidInputError
from pagedattn._arrays.inspect import shown


class AttentionType(StrEnum):
    """The type of an attention call. Functions that take one also take its string.

    - DECODER: causal self-attention over the cache.
    - ENCODER: self-attention of the encoder of an encoder-decoder model; nothing is cached.
    - ENCODER_ONLY: self-attention both ways over the ordinary sequences; nothing is cached.
    - ENCODER_DECODER: cross-attention, decoder queries over cached encoder keys.

    >>> AttentionType("encoder_only")
    <AttentionType.ENCODER_ONLY: 'encoder_only'>
    """

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"

    @classmethod
    def of(cls, value: "AttentionType | str") -> "AttentionType":
        """The type for a member, its string, or a member of another library's enum of its name.

        Other enums are taken by names, not values: vLLM's had numbers until 0.6.3.

        Raises:
          InvalidInputError: it is none of these.

        >>> AttentionType.of("decoder").causal
        True
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, Enum) and value.name in cls.__members__:
            return cls[value.name]
        return cls(str(value)) if isinstance(value, str | Enum) else cls._missing_(value)

    @classmethod
    def _missing_(cls, value):
        raise InvalidInputError(f"attn_type must be one of {[*map(str, cls)]}, got {shown(value)}")

    @property
    def causal(self) -> bool:
        return self is AttentionType.DECODER

    @property
    def cached(self) -> bool:
        """Whether its keys live in the paged cache."""
        return self in (AttentionType.DECODER, AttentionType.ENCODER_DECODER)
