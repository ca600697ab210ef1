"""The families of models that the example serves, by the `model_type` of their `config.json`."""

from pagedattn import InvalidInputError
from pagedattn_serving.families.decoder import Decoder

from .bloom import Bloom
from .cohere import Cohere, Cohere2
from .deepseek import DeepseekV2, DeepseekV3
from .gemma import Gemma2, Gemma3
from .gpt_oss import GptOss
from .granite import Granite
from .llama import Llama
from .mistral import Mistral, Mixtral
from .olmo import Olmo2, Olmo3
from .phi3 import Phi3
from .qwen import Qwen2, Qwen3, Qwen3Moe
from .smollm3 import SmolLM3

MIXTURES = (Mixtral, Qwen3Moe, GptOss, DeepseekV2, DeepseekV3)
OTHERS = (Gemma2, Gemma3, Phi3, Olmo2, Olmo3, Granite, SmolLM3, Cohere, Cohere2, Bloom)
FAMILIES = {f.model_type: f for f in (Llama, Mistral, Qwen2, Qwen3, *MIXTURES, *OTHERS)}


def model_of(raw: dict) -> Decoder:
    """The model of a parsed `config.json`.

    Raises:
      InvalidInputError: No family has its `model_type`, or it asks for what is not computed here.
    """
    name = raw.get("model_type", "")
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(FAMILIES)
        raise InvalidInputError(f"expected a model_type of {known}, got {name!r}")
    return family.from_config(raw)
