"""A checkpoint's text: its tokenizer, and its template of chats."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Template, TemplateError

from pagedattn import InvalidInputError
from pagedattn_serving.checkpoint.tokenizer import TOKENIZER, read_tokenizer
from pagedattn_serving.server.detokenise import UNFINISHED
from pagedattn_serving.server.refusal import Refusal, invalid
from pagedattn_serving.server.template import compile_template

TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
NUM_BYTES = 256


@dataclass(frozen=True)
class Text:
    """How text becomes tokens, and tokens text.

    Fields:
      encode: the tokens of a text; with those that begin every text, if the flag is set.
      decode: the text of tokens, without special ones.
      spell: a token as text, special or not, and its bytes if they are known.
      template: turns messages into the text that the model continues, if the checkpoint has one.
      special: the names of special tokens, which templates use.
    """

    encode: Callable[[str, bool], list[int]]
    decode: Callable[[Sequence[int]], str]
    spell: Callable[[int], tuple[str, list[int] | None]]
    template: Template | None
    special: dict[str, str]

    def chat(self, messages: list[dict], begin: bool = False) -> list[int]:
        """The tokens of a chat, up to where the assistant's answer begins.

        Templates write what begins a text themselves; `begin` has the tokenizer add it as well.
        """
        if self.template is None:
            raise Refusal(
                400,
                f"messages: this model has no chat template; /v1/completions takes its prompts, "
                f"and a {CHAT_TEMPLATE} beside its config.json makes it chat",
                "messages",
                "no_chat_template",
            )
        try:
            given = {"messages": messages, "tools": None, "documents": None}
            text = self.template.render(add_generation_prompt=True, **given, **self.special)
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise invalid("messages", f"the chat template refuses them: {error}") from error
        return self.encode(text, begin)


def load_text(directory: Path, vocab_size: int) -> Text:
    """The text of the checkpoint in a folder.

    Raises InvalidInputError without a tokenizer, unless the model's tokens are the 256 bytes.
    """
    config = _read_config(directory / TOKENIZER_CONFIG)
    parts = {"template": _template(directory, config), "special": _special(config)}
    path = directory / TOKENIZER
    if path.exists():
        return _from_file(path, parts)
    if vocab_size == NUM_BYTES:
        return Text(_encode_bytes, _decode_bytes, _spell_byte, **parts)
    raise InvalidInputError(
        f"expected a tokenizer, but there is no {path}: only a model of {NUM_BYTES} tokens is read "
        f"as one of bytes, and this one has {vocab_size}"
    )


def _from_file(path: Path, parts: dict) -> Text:
    theirs = read_tokenizer(path)

    def spell(token: int) -> tuple[str, list[int] | None]:
        # After itself: at the start of a text decoders strip a space.
        once, twice = (theirs.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        if UNFINISHED in once:
            return once, None
        return twice[len(once) :], list(twice[len(once) :].encode())

    def encode(text: str, begin: bool) -> list[int]:
        return theirs.encode(text, add_special_tokens=begin).ids

    return Text(encode, theirs.decode, spell, **parts)


def _encode_bytes(text: str, begin: bool) -> list[int]:
    del begin
    return list(text.encode())


def _decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def _spell_byte(token: int) -> tuple[str, list[int] | None]:
    return _decode_bytes([token]), [token]


def _read_config(path: Path) -> dict:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidInputError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidInputError(f"expected an object in {path}, got {type(config).__name__}")
    return config


def _template(directory: Path, config: dict) -> Template | None:
    """The template of the folder: a file of its own, or in the tokenizer's config."""
    path = directory / CHAT_TEMPLATE
    source = path.read_text() if path.exists() else config.get("chat_template")
    if isinstance(source, list):  # several by name; the one of plain chats is called default
        source = {each["name"]: each["template"] for each in source}.get("default")
    if source is None:
        return None
    try:
        return compile_template(source)
    except TemplateError as error:
        raise InvalidInputError(f"the chat template of {directory}: {error}") from error


def _special(config: dict) -> dict[str, str]:
    """bos_token, eos_token and their like, as text."""
    tokens = {name: token for name, token in config.items() if name.endswith("_token")}
    texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
