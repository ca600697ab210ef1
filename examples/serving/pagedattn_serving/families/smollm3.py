"""SmolLM3: Llama of which some layers know no positions."""

from dataclasses import dataclass
from typing import ClassVar

from pagedattn_serving.families.decoder import Heads, Tokens

from .windowed import FULL, Windowed


@dataclass(frozen=True, kw_only=True)
class SmolLM3(Windowed):
    """By default every fourth layer rotates nothing."""

    no_rope_layers: tuple[int, ...]  # 0 where a layer rotates nothing
    rope_theta: float = 2e6
    tie_word_embeddings: bool = True

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    ignored: ClassVar[tuple[str, ...]] = ("max_window_layers", "no_rope_layer_interval")

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        del raw, index
        return FULL

    @classmethod
    def read(cls, raw: dict) -> dict:
        every = raw.get("no_rope_layer_interval", 4)
        default = [(index + 1) % every for index in range(raw["num_hidden_layers"])]
        raw |= {"no_rope_layers": raw.get("no_rope_layers") or default}
        return super().read(raw | {"sliding_window": None})  # unless use_sliding_window: refused

    def rotate(self, index: int, heads: Heads, positions: Tokens) -> Heads:
        return super().rotate(index, heads, positions) if self.no_rope_layers[index] else heads
