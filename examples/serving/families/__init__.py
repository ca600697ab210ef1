"""The families of models that the example serves, by the `model_type` of their `config.json`."""

from pagedattn import InvalidInputError
from serving.decoder import Decoder

from .bloom import Bloom
from .gemma import Gemma2, Gemma3
from .gpt_oss import GptOss
from .granite import Granite
from .llama import Llama
from .mistral import Mistral, Mixtral
from .olmo import Olmo2, Olmo3
from .phi3 import Phi3
from .qwen import Qwen2, Qwen3, Qwen3Moe

LLAMAS = (Llama, Mistral, Mixtral, Qwen2, Qwen3, Qwen3Moe, Gemma2, Gemma3, Phi3, Olmo2, Olmo3)
FAMILIES = {family.model_type: family for family in (*LLAMAS, Granite, GptOss, Bloom)}


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
