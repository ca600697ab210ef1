"""What a `config.json` may say: a family computes it, or it changes nothing, or it is refused."""

from collections.abc import Container, Mapping

from pagedattn import InvalidInputError

# Settings that no token depends on: of training, of other programs, of the text's ends.
INERT = frozenset(
    [
        "architectures",
        "auto_map",
        "cache_implementation",
        "dtype",
        "torch_dtype",
        "tokenizer_class",
        "use_cache",
        "transformers_version",
        "initializer_range",
        "pretraining_tp",
        "bos_token_id",
        "pad_token_id",
        "unk_token_id",
        "sep_token_id",
        "attention_dropout",
        "hidden_dropout",
        "embd_pdrop",
        "resid_pdrop",
        "output_router_logits",
        "router_aux_loss_coef",
        "router_jitter_noise",
    ]
)


def require(family: str, raw: dict, accepted: Mapping[str, tuple]) -> None:
    """Refuses settings that have none of the accepted values; the first is the default.

    Raises:
      InvalidInputError: One has another value.
    """
    for name, values in accepted.items():
        value = raw.get(name, values[0])
        if value not in values:
            raise InvalidInputError(f"{family}: expected {name} to be in {values}, got {value!r}")


def refuse_others(family: str, raw: dict, computed: Container[str]) -> None:
    """Refuses a config that asks for something else than what is computed.

    What is null, false, zero or empty asks for nothing, and so does a name with an underscore
    before it, which transformers keeps for itself.

    Raises:
      InvalidInputError: The settings that nothing computes, by their names.
    """
    asked = (name for name, value in raw.items() if value and not name.startswith("_"))
    unknown = sorted(name for name in asked if name not in computed and name not in INERT)
    if unknown:
        raise InvalidInputError(
            f"{family}: expected settings that are computed here, got {', '.join(unknown)}; those "
            "that no token depends on belong in INERT of settings.py"
        )
