"""The families of models that the example serves, by the `model_type` of their `config.json`."""

from pagedattn import InvalidInputError
from serving.decoder import Decoder

from .bloom import Bloom
from .gemma2 import Gemma2
from .llama import Llama, Mistral, Qwen2, Qwen3

FAMILIES = {family.model_type: family for family in (Llama, Mistral, Qwen2, Qwen3, Gemma2, Bloom)}


def model_of(raw: dict) -> Decoder:
    """The model of a parsed `config.json`; InvalidInputError for what is not computed here."""
    name = raw.get("model_type", "")
    family = FAMILIES.get(name)
    if family is None:
        raise InvalidInputError(f"expected a model_type of {list(FAMILIES)}, got {name!r}")
    return family.from_config(raw)
