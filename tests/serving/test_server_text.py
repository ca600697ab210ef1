"""Text as it comes: no half characters, no beginnings of stop strings; chat templates."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pagedattn_serving.decoding.request import Streamed
from pagedattn_serving.server.detokenise import Detokenizer, Stops
from pagedattn_serving.server.refusal import Refusal
from pagedattn_serving.server.response import Sample, joined
from pagedattn_serving.server.text import Text, _decode_bytes, _encode_bytes, _spell_byte, load_text
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pagedattn import InvalidInputError

FEW = st.text("ab", min_size=1, max_size=4)


def byte_level():
    """A byte-level tokenizer whose tokens are single bytes, a few pairs and a special one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("a", "b"), ("Ã", "©"), ("Ġ", "a"), ("ð", "Ł")]
    vocab = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocab)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>")])
    return tokenizer


def byte_fallback():
    """As those of Llama 2: characters, and bytes for those that have no token.

    Its decoder marks every byte of a run of them, if the run is no text as a whole.
    """
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "é"]
    model = models.BPE({token: i for i, token in enumerate(vocab)}, [("▁", "a")])
    model.unk_token, model.byte_fallback = "<unk>", True
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


BYTE_LEVEL, BYTE_FALLBACK = byte_level(), byte_fallback()
DECODERS = {
    "bytes": lambda tokens: bytes(tokens).decode(errors="replace"),
    "byte-level": BYTE_LEVEL.decode,
}
WRITTEN = st.text(st.characters(codec="utf-8") | st.sampled_from(" ab▁éж你😀"), max_size=60)


def in_pieces(tokens, decode, prompt=()):
    detokenizer = Detokenizer(decode, prompt)
    return [*map(detokenizer.push, tokens), detokenizer.flush()]


@given(st.text(max_size=60), st.text(max_size=9))
def test_pieces_are_the_text_and_no_character_is_halved(text, prompt):
    for name, encode in (("bytes", str.encode), ("byte-level", lambda t: BYTE_LEVEL.encode(t).ids)):
        pieces = in_pieces(list(encode(text)), DECODERS[name], list(encode(prompt)))
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@given(WRITTEN, WRITTEN)
def test_characters_spelled_in_bytes_come_whole_beside_each_other(text, prompt):
    """In a stream as in the whole, wherever the prompt's end is cut."""
    prompt = BYTE_FALLBACK.encode(prompt).ids
    tokens = BYTE_FALLBACK.encode(text).ids
    whole = BYTE_FALLBACK.decode(prompt + tokens)
    pieces = in_pieces(tokens, BYTE_FALLBACK.decode, prompt)
    assert BYTE_FALLBACK.decode(prompt) + "".join(pieces) == whole
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.binary(max_size=120))
def test_bytes_that_are_no_text_are_marked_as_python_marks_them(data):
    pieces = in_pieces(list(data), DECODERS["bytes"])
    assert "".join(pieces) == data.decode(errors="replace")


def test_no_more_than_an_unfinished_character_is_held_back():
    detokenizer = Detokenizer(DECODERS["bytes"])
    sent = "".join(detokenizer.push(0xFF) for _ in range(200))
    assert len(sent) >= 197
    assert len(detokenizer.tokens) < 40


@given(st.lists(FEW, max_size=8), st.lists(FEW, max_size=4))
def test_stop_strings_cut_alike_however_the_text_comes(pieces, stops):
    text = "".join(pieces)
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    end, length = min(ends, default=(len(text), 0))
    for parts in (pieces, list(text), [text]):
        reader = Stops(stops)
        passed = ""
        for part in parts:
            passed += reader.push(part)
            # What may begin a stop string is not shown, and nothing else is kept back.
            kept = text[: end + length] if reader.found else None
            assert kept is None or passed == kept
            assert not any(stop in passed for stop in stops)
        assert reader.found == bool(ends)
        assert passed + ("" if reader.found else reader.flush()) == text[: end + length]


@given(FEW, st.text("ab", max_size=12), st.lists(FEW, max_size=4))
def test_no_stop_string_ends_in_early_text(early, late, stops):
    text = early + late
    ends = [
        (start + len(stop), -len(stop))
        for stop in stops
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > len(early)
    ]
    end, length = min(ends, default=(len(text), 0))
    for parts in ([early], list(early)):
        reader = Stops(stops)
        passed = [reader.push(part, early=True) for part in parts]
        passed += [reader.push(part) for part in late]
        passed += [] if reader.found else [reader.flush()]
        assert reader.found == bool(ends)
        assert "".join(passed) == text[: end + length]


def test_text_that_may_begin_a_stop_string_waits():
    reader = Stops(["<end>"])
    assert [reader.push(part) for part in ("a<", "en", "b", "<e", "nd>c")] == [
        "a",
        "",
        "<enb",
        "",
        "",
    ]
    assert reader.found


@given(st.text("aé😀", max_size=12), st.sampled_from(["", "é", "aé"]), st.booleans())
def test_logprobs_stand_beside_the_text_that_is_shown(text, stop, ends):
    """The tokens of all pieces spell what is shown, and begin within it."""
    tokens = list(text.encode()) or [97]
    reader = Sample(0, load_bytes(), (), (stop,) if stop else ())
    last = len(tokens) - 1
    pieces = [
        reader.push(
            Streamed(0, t, 0, i == last, ("stop" if ends else "length") if i == last else None)
        )
        for i, t in enumerate(tokens)
    ]
    whole = joined([piece for piece in pieces if piece])
    shown = whole.text.encode()
    spelled = bytes(token.token for _, token in whole.tokens)
    assert whole.reason == ("stop" if ends or (stop and stop in text) else "length")
    assert spelled.startswith(shown) or b"\xef\xbf\xbd" in shown
    assert all(offset <= len(whole.text) for offset, _ in whole.tokens)


def load_bytes():
    return Text(_encode_bytes, _decode_bytes, _spell_byte, None, {})


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["level", "fallback"])
@given(text=st.text(" abé", max_size=20))
def test_tokens_are_spelled_as_they_stand_in_the_text(tmp_path_factory, tokenizer, text):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save(str(folder / "tokenizer.json"))
    loaded = load_text(folder, 300)
    spelled = [loaded.spell(token) for token in loaded.encode("b" + text, False)]
    assert all(bytes(own).decode() == token for token, own in spelled if own is not None)
    if all(own is not None for _, own in spelled):
        assert "".join(token for token, _ in spelled).lstrip() == "b" + text


def test_no_prompt_is_cut_or_filled_up(tmp_path):
    """As their training may have asked for; transformers forgets it too."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = load_text(tmp_path, 300)
    assert [len(text.encode("b" * length, True)) for length in (1, 9)] == [1, 9]


TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('system is first') }}
    {%- endif %}
<|{{ message.role }}|>
{{ message.content | trim }}<end>
{% if message.content == 'quit' %}{% break %}{% endif %}
{% endfor %}
{% set kept = 'yes' %}{% generation %}{% set kept = 'no' %}{{ kept }}
{% endgeneration %}{{ kept }}{{ documents is defined }}
{{ {'b': ['é<'], 'a': 1} | tojson(false, 1, separators=(';', '='), sort_keys=true) }}
{% if add_generation_prompt %}<|assistant|>{{ {'a': 'é<&'} | tojson }}{% endif %}"""
MESSAGES = [
    {"role": "system", "content": " Be kind. "},
    {"role": "user", "content": "é <b>&amp;"},
    {"role": "user", "content": "quit"},
    {"role": "user", "content": "never"},
]


def test_chat_templates_give_what_transformers_makes_of_them(tmp_path):
    transformers = pytest.importorskip("transformers")
    BYTE_LEVEL.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "eos_token": "<end>", "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    text = load_text(tmp_path, 300)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<s>", eos_token="<end>"
    )
    options = {"chat_template": TEMPLATE, "add_generation_prompt": True}
    expected = theirs.apply_chat_template(MESSAGES, tokenize=False, **options)
    assert text.decode(text.chat(MESSAGES)) == expected.replace("<end>", "")


def test_what_a_template_refuses_is_the_clients_error(tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    text = load_text(tmp_path, 256)
    with pytest.raises(Refusal, match="system is first"):
        text.chat(MESSAGES[1:2] + MESSAGES[:1])


def test_templates_reach_nothing_outside(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(Refusal, match="unsafe"):
        load_text(tmp_path, 256).chat(MESSAGES)


def test_without_a_template_there_are_no_chats(tmp_path):
    with pytest.raises(Refusal, match="no chat template"):
        load_text(tmp_path, 256).chat(MESSAGES)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", "{}", "no tokenizer"),
        ("tokenizer_config.json", "{", "no JSON"),
        ("tokenizer_config.json", "[]", "expected an object"),
        ("chat_template.jinja", "{% if %}", "chat template"),
        ("other", "", "there is no .*tokenizer.json"),
    ],
)
def test_broken_folders_are_refused(tmp_path, name, content, match):
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInputError, match=match):
        load_text(tmp_path, 300)
