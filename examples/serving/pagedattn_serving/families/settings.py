"""What a `config.json` may say: a family computes it, or it changes nothing, or it is refused."""

from collections.abc import Container, Mapping
from types import UnionType
from typing import Any, get_args, get_origin

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
    given = (name for name, value in raw.items() if value and not name.startswith("_"))
    unknown = sorted(name for name in given if name not in computed and name not in INERT)
    if unknown:
        raise InvalidInputError(
            f"{family}: expected settings that are computed here, got {', '.join(unknown)}; those "
            "that no token depends on belong in INERT of settings.py"
        )


def require_kinds(family: str, values: Mapping[str, Any], kinds: Mapping[str, Any]) -> None:
    """Refuses values of another type than their setting has; null is left to the family.

    Raises:
      InvalidInputError: One has another type, as a text in place of a number.
    """
    for name, value in values.items():
        if value is not None and not _is_of(value, kinds[name]):
            kind = getattr(kinds[name], "__name__", kinds[name])
            raise InvalidInputError(f"{family}: expected {name} to be {kind}, got {value!r}")


def _is_of(value, kind) -> bool:
    if isinstance(kind, UnionType):
        return any(_is_of(value, each) for each in get_args(kind))
    if get_origin(kind) is tuple:  # tuple[int, ...]
        return isinstance(value, tuple) and all(_is_of(each, get_args(kind)[0]) for each in value)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)
