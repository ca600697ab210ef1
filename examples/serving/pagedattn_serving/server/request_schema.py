"""What a request asks for, read from its JSON: every value checked, nothing ignored in silence."""

from dataclasses import dataclass
from typing import Any

from pagedattn_serving.decoding.sampling import MAX_LOGPROBS
from pagedattn_serving.server.messages import read_messages
from pagedattn_serving.server.refusal import Refusal, invalid
from pagedattn_serving.server.values import Read, flag, kind, number, string, whole

# They change no result: whose request it is, how it is stored or billed.
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "safety_identifier"),
    *("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
    *("guided_decoding_backend", "guided_whitespace_pattern"),  # of guides, which are refused
    *("include_reasoning", "spaces_between_special_tokens"),  # of what no answer here has
}
# Not computed here: only the values that ask for nothing are taken, and null always is.
UNSUPPORTED: dict[str, tuple] = {
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p"), (0,)),
    **dict.fromkeys(("audio", "prediction", "verbosity", "moderation", "web_search_options"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("structured_outputs", "structural_tag", "prompt_embeds"), ()),
    **dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "allowed_token_ids"), ()),
    **dict.fromkeys(("chat_template", "cache_salt", "request_id", "data_parallel_rank"), ()),
    **dict.fromkeys(("echo", "use_beam_search", "early_stopping"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "continue_final_message"), (False,)),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "add_generation_prompt"), (True,)),
    **dict.fromkeys(("tool_choice", "function_call"), ("none", "auto")),
    **dict.fromkeys(("tools", "functions", "bad_words", "logits_processors", "documents"), ([],)),
    **dict.fromkeys(("logit_bias", "chat_template_kwargs", "mm_processor_kwargs"), ({},)),
    **dict.fromkeys(("kv_transfer_params", "vllm_xargs", "media_io_kwargs"), ({},)),
    **dict.fromkeys(("best_of", "repetition_penalty", "length_penalty"), (1,)),
    "suffix": ("",),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "response_format": ({"type": "text"},),
}
FIELDS = {
    "stop_token_ids": "stop_tokens",
    "add_special_tokens": "begin",
}  # of Parameters
MAX_TOKEN = 2**31 - 1
COMPLETION_TOKENS = 16  # OpenAI's default for completions; chats may fill the context
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 4, 256, 64
MAX_TEXT_LOGPROBS = 5


@dataclass(frozen=True)
class Parameters:
    """A checked request.

    Fields:
      prompts: texts or tokens to continue; of a chat, nothing.
      messages: those of a chat, else nothing.
      max_tokens: None for as many as fit.
      logprobs: how many alternatives to tell beside each token's logprob; None for no logprobs.
      seed: None if any will do.
      stop_tokens: which end an answer, besides the model's own.
      echo: whether the answers begin with the prompt.
      begin: whether the prompt gets the tokens that begin every text; None for the endpoint's way.
    """

    model: str
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict, ...] = ()
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int | None = None
    n: int = 1
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_tokens: tuple[int, ...] = ()
    echo: bool = False
    begin: bool | None = None


def read_completion(body: Any) -> Parameters:
    """The request of /v1/completions; Refusal with the parameter's name if one is wrong."""
    extra = {"prompt": _prompts, "logprobs": whole(0, MAX_TEXT_LOGPROBS), "echo": flag}
    values = _values(body, COMMON | extra)
    if values.get("echo") and "logprobs" in values:
        raise invalid("echo", "this server tells no logprobs of prompts", "unsupported_parameter")
    prompts = values.pop("prompt", None)
    if prompts is None:
        raise invalid("prompt", "expected one, got none")
    values.setdefault("max_tokens", COMPLETION_TOKENS)
    return Parameters(prompts=prompts, **values)


def read_chat(body: Any) -> Parameters:
    """The request of /v1/chat/completions; Refusal with the parameter's name if one is wrong."""
    extra = {"messages": read_messages, "logprobs": flag, "top_logprobs": whole(0, MAX_LOGPROBS)}
    values = _values(body, COMMON | extra | {"max_completion_tokens": whole(1)})
    if "messages" not in values:
        raise invalid("messages", "expected at least one, got none")
    told, top = values.pop("logprobs", False), values.pop("top_logprobs", None)
    if top and not told:
        raise invalid("top_logprobs", "needs logprobs to be true")
    newer = values.pop("max_completion_tokens", None)
    if newer is not None and values.setdefault("max_tokens", newer) != newer:
        raise invalid("max_tokens", "differs from max_completion_tokens")
    return Parameters(logprobs=(top or 0) if told else None, **values)


def read_tokenize(body: Any, model: str) -> tuple[Parameters, bool]:
    """The request of /tokenize, which may leave out the model; whether to spell the tokens too."""
    body = {"model": model} | body if isinstance(body, dict) else body
    extra = {"prompt": string, "messages": read_messages, "return_token_strs": flag}
    values = _values(body, {name: COMMON[name] for name in ("model", "add_special_tokens")} | extra)
    if ("prompt" in values) == ("messages" in values):
        raise invalid("prompt", "expected either a prompt or messages")
    prompts, spelled = values.pop("prompt", None), values.pop("return_token_strs", False)
    return Parameters(prompts=() if prompts is None else (prompts,), **values), spelled


def _values(body: Any, readers: dict[str, Read]) -> dict[str, Any]:
    """The fields of `Parameters` that the body gives; null stands for what is not given."""
    if not isinstance(body, dict):
        raise Refusal(400, f"expected a JSON object, got {kind(body)}")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name not in readers:
            _require_neutral(name, value)
    if "model" not in given:
        raise invalid("model", "expected the model's name, got none")
    options = given.get("stream_options")
    values = {name: read(name, given[name]) for name, read in readers.items() if name in given}
    if options is not None and not values.get("stream"):
        raise invalid("stream_options", "needs stream to be true")
    values["include_usage"] = values.pop("stream_options", False)
    return {FIELDS.get(name, name): value for name, value in values.items()}


def _require_neutral(name: str, value: Any) -> None:
    """Refuses what would change the result and is not computed."""
    if name in WITHOUT_EFFECT:
        return
    if name not in UNSUPPORTED:
        raise invalid(name[:80], "no parameter has this name", "unknown_parameter")
    if not any(value == neutral for neutral in UNSUPPORTED[name]):
        raise invalid(name, "this server does not compute it", "unsupported_parameter")


def _top_k(name: str, value: Any) -> int | None:
    """0 and -1 are other servers' names for all tokens."""
    return whole(-1)(name, value) if value not in (0, -1) else None


def _stops(name: str, value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise invalid(name, f"expected a string or up to {MAX_STOPS} of them")
    if not all(0 < len(string(name, stop)) <= MAX_STOP_CHARACTERS for stop in stops):
        raise invalid(name, f"expected strings of 1 to {MAX_STOP_CHARACTERS} characters")
    return tuple(stops)


def _stop_tokens(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_STOP_TOKENS:
        raise invalid(name, f"expected a list of up to {MAX_STOP_TOKENS} tokens")
    return tuple(whole(0, MAX_TOKEN)(name, token) for token in value)


def _stream_options(name: str, value: Any) -> bool:
    if not isinstance(value, dict):
        raise invalid(name, f"expected an object, got {kind(value)}")
    given = {key: option for key, option in value.items() if option is not None}
    not_done = ("include_obfuscation", "continuous_usage_stats")
    for key in given.keys() - {"include_usage", *not_done}:
        raise invalid(f"{name}.{key[:80]}", "no option has this name", "unknown_parameter")
    for key in not_done:
        if given.get(key):
            raise invalid(f"{name}.{key}", "not done here", "unsupported_parameter")
    return flag(f"{name}.include_usage", given.get("include_usage", False))


def _prompts(name: str, value: Any) -> tuple:
    """A text, tokens, or a list of either."""
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        value = [value]
    if not isinstance(value, list) or not value:
        raise invalid(name, "expected a text, a list of texts, of tokens or of lists of tokens")
    return tuple(_prompt(name, each) for each in value)


def _prompt(name: str, value: Any) -> str | tuple[int, ...]:
    if not isinstance(value, list):
        return string(name, value)
    if not all(type(token) is int for token in value):
        raise invalid(name, "expected tokens as integers")
    return tuple(value)


COMMON: dict[str, Read] = {
    "model": string,
    "max_tokens": whole(1),
    "stream": flag,
    "stream_options": _stream_options,
    "stop": _stops,
    "temperature": number(0, 2),
    "top_p": number(0, 1, open_below=True),
    "top_k": _top_k,
    "seed": whole(-(2**63), 2**63 - 1),
    "n": whole(1, 128),
    "ignore_eos": flag,
    "min_tokens": whole(0),
    "stop_token_ids": _stop_tokens,
    "add_special_tokens": flag,
}
