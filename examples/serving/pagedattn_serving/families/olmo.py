"""OLMo 2 and 3: norms after every branch instead of before, and over all heads together."""

from collections.abc import Mapping
from dataclasses import dataclass

from pagedattn_serving.families.decoder import Name

from .llama import BRANCH_NORMS, HEAD_NORMS, MLP
from .windowed import FULL, SLIDING, Windowed


@dataclass(frozen=True, kw_only=True)
class Olmo2(Windowed):
    """Llama with other norms, and no window."""

    rms_norm_eps: float = 1e-5

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        del raw, index
        return FULL

    def attention_names(self) -> Mapping[str, Name]:
        names = {**super().attention_names(), **HEAD_NORMS}
        return {ours: theirs for ours, theirs in names.items() if ours != "attention_norm"}

    def mlp_names(self) -> Mapping[str, Name]:
        return {**{name: MLP[name] for name in ("gate", "up", "down")}, **BRANCH_NORMS}


@dataclass(frozen=True, kw_only=True)
class Olmo3(Olmo2):
    """OLMo 2 with a window in three of four layers, which a scaled RoPE leaves as they are."""

    rope_theta: float = 500000.0
    rope_local_base_freq: float | None = 500000.0

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"

    @classmethod
    def layer_type(cls, raw: dict, index: int) -> str:
        del raw
        return SLIDING if (index + 1) % 4 else FULL
