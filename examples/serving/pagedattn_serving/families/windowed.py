"""Layers that see only the last tokens, all of them or some, and may rotate otherwise."""

from dataclasses import dataclass

from pagedattn import AttentionSpec, InvalidInputError
from pagedattn_serving.families.decoder import Heads, Tokens

from .llama import Llama
from .rotary import rope, take_rope

FULL, SLIDING = "full_attention", "sliding_attention"  # the `layer_types` of a config


@dataclass(frozen=True, kw_only=True)
class Windowed(Llama):
    """Llama with a sliding window in the layers of type `SLIDING`.

    Where `rope_local_base_freq` is given, those layers have a RoPE of their own, without a scaling.
    """

    sliding_window: int | None = None
    layer_types: tuple[str, ...]
    rope_local_base_freq: float | None = None

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        """The type of a layer where the config lists none."""
        del raw, index
        return SLIDING

    @classmethod
    def read(cls, raw: dict) -> dict:
        num_layers = raw["num_hidden_layers"]
        listed = raw.get("layer_types")
        types = tuple(listed or (cls.layer_type(raw, index) for index in range(num_layers)))
        if len(types) != num_layers or not {FULL, SLIDING}.issuperset(types):
            raise InvalidInputError(
                f"expected layer_types of {FULL} or {SLIDING} for {num_layers} layers, got {types}"
            )
        return super().read(split_ropes(raw) | {"layer_types": types})

    def slides(self, index: int) -> bool:
        return self.layer_types[index] == SLIDING

    def attention_spec(self, index: int) -> AttentionSpec:
        return AttentionSpec(sliding_window=self.sliding_window if self.slides(index) else None)

    def rotate(self, index: int, heads: Heads, positions: Tokens) -> Heads:
        if self.slides(index) and self.rope_local_base_freq is not None:
            return rope(heads, positions, self.rope_local_base_freq)
        return super().rotate(index, heads, positions)


def split_ropes(raw: dict) -> dict:
    """The config with the RoPE of layers with a window apart, as older versions keep it.

    Raises:
      InvalidInputError: That one is scaled.
    """
    by_type = raw.get("rope_parameters") or {}
    if SLIDING not in by_type:
        return raw
    local = take_rope({"rope_parameters": by_type[SLIDING]})
    if local.get("rope_scaling"):
        raise InvalidInputError(f"a RoPE of {SLIDING} that is scaled is not implemented")
    own = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
    return raw | own | {"rope_parameters": by_type.get(FULL)}
