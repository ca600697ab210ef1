"""transformers' models on this library's attention: the tokens and logits of transformers' own."""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import pagedattn_torch.transformers as ours
from pagedattn import UnsupportedError

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
# What each adds: plain, a window on all layers, windows on some and a soft-cap, norms of heads,
# sinks.
MODELS = {
    "Llama": {},
    "Mistral": {"sliding_window": 7},
    "Gemma2": {
        "sliding_window": 6,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 1.5,
    },
    "Qwen3": {},
    "GptOss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4},
}
IDS = torch.randint(2, 97, (3, 12), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[0] * 5 + [1] * 7, [1] * 12, [0] + [1] * 11])
NAME = ours.register()


@functools.cache
def model(family: str, **options):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES | options)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def with_attention(family: str, implementation: str, **options):
    made = model(family, **MODELS.get(family, {}) | options)
    made.set_attn_implementation(implementation)
    return made


def generated(family: str, implementation: str):
    made = with_attention(family, implementation)
    settings = {"do_sample": False, "output_scores": True, "return_dict_in_generate": True}
    got = made.generate(IDS * LEFT, attention_mask=LEFT, max_new_tokens=20, **settings)
    return got.sequences, torch.stack(got.scores)


@torch.no_grad()
def logits(family: str, implementation: str, **inputs):
    return with_attention(family, implementation)(IDS, **inputs).logits


@pytest.mark.parametrize("family", MODELS)
def test_generation_with_left_padding_is_that_of_eager(family):
    (tokens, scores), (their_tokens, their_scores) = (
        generated(family, name) for name in (NAME, "eager")
    )
    assert torch.equal(tokens, their_tokens)
    torch.testing.assert_close(scores, their_scores, rtol=0, atol=2e-6)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("padding", ["left", "right", "none"])
def test_real_tokens_get_the_logits_of_eager(family, padding):
    shown = {"left": LEFT, "right": LEFT.flip(1), "none": torch.ones_like(LEFT)}[padding]
    inputs = {} if padding == "none" else {"attention_mask": shown}
    got, expected = (logits(family, name, **inputs) for name in (NAME, "eager"))
    torch.testing.assert_close(got[shown.bool()], expected[shown.bool()], rtol=0, atol=2e-6)


def test_an_encoder_sees_both_sides():
    sizes = {name: size for name, size in SIZES.items() if name != "head_dim"}
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(**sizes), add_pooling_layer=False).eval()
    results = []
    for name in (NAME, "eager"):
        bert.set_attn_implementation(name)
        with torch.no_grad():
            results.append(bert(IDS, attention_mask=LEFT.flip(1)).last_hidden_state)
    real = LEFT.flip(1).bool()
    torch.testing.assert_close(results[0][real], results[1][real], rtol=0, atol=2e-6)


BART = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 32,
    "forced_eos_token_id": None,
}


@functools.cache
def bart():
    torch.manual_seed(0)
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**SIZES | BART)).eval()


@pytest.mark.parametrize("padding", ["left", "right", "none"])
@pytest.mark.parametrize("length", [1, 9, 12, 15])  # of the decoder's tokens; the encoder has 12
@torch.no_grad()
def test_a_decoder_sees_what_an_encoder_read(length, padding):
    """Padding of the encoder's tokens says nothing of the decoder's."""
    shown = {"left": LEFT, "right": LEFT.flip(1), "none": None}[padding]
    results = []
    for name in (NAME, "eager"):
        bart().set_attn_implementation(name)
        inputs = {"attention_mask": shown, "decoder_input_ids": IDS.repeat(1, 2)[:, :length]}
        results.append(bart()(IDS, **inputs).logits)
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("length", "num_keys"), [(5, 3), (3, 5), (4, 4), (1, 6)])
def test_without_a_mask_each_query_sees_each_key(length, num_keys):
    """As Whisper's decoder sees sounds."""
    module = torch.nn.Module()
    module.is_causal = False
    query, key, value = (torch.randn(2, 4, n, 16) for n in (length, num_keys, num_keys))
    attend = transformers.AttentionInterface()[NAME]
    out, _ = attend(module, query, key, value, None, is_causal=False)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=0, atol=2e-6)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_an_encoder_decoder_generates_the_tokens_of_eager(padding):
    shown = {"left": LEFT, "right": LEFT.flip(1)}[padding]
    results = []
    for name in (NAME, "eager"):
        bart().set_attn_implementation(name)
        settings = {"max_new_tokens": 16, "do_sample": False, "num_beams": 1}
        results.append(bart().generate(IDS, attention_mask=shown, **settings))
    assert torch.equal(*results)


def packed_ids():
    return torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])


REFUSED = {
    "packed sequences": (
        {"position_ids": packed_ids().expand(3, -1), "use_cache": False},
        "packed",
    ),
    "a mask of four dimensions": ({"attention_mask": torch.ones(3, 1, 12, 12) > 0}, "dimensions"),
    "weights": ({"output_attentions": True}, "output_attentions"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused(name):
    inputs, word = REFUSED[name]
    with pytest.raises(UnsupportedError, match=word):
        logits("Llama", NAME, **inputs)


def test_a_static_cache_is_refused():
    with pytest.raises(UnsupportedError, match="static cache"):
        with_attention("Llama", NAME).generate(
            IDS, max_new_tokens=2, cache_implementation="static", disable_compile=True
        )


def test_training_is_refused():
    made = with_attention("Llama", NAME)
    with pytest.raises(UnsupportedError, match="gradients"):
        made(IDS, labels=IDS)
    dropping = with_attention("Llama", NAME, attention_dropout=0.1).train()
    with pytest.raises(UnsupportedError, match="dropout"), torch.no_grad():
        dropping(IDS)


LENGTHS = (5, 33, 70, 1, 18, 40, 64, 7)
PROMPTS = [torch.randint(2, 97, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
# The last one hands a long prompt over in chunks.
ENGINES = {"whole prompts": 256, "chunks of prompts": 32}


def batched(made, max_batch_tokens: int) -> list[list[int]]:
    settings = GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=-1, pad_token_id=0)
    # Where there is a GPU, transformers' engine runs on no other device.
    made = made.to("cuda" if torch.cuda.is_available() else "cpu")
    engine = ContinuousBatchingConfig(
        page_size=16, num_blocks=64, max_batch_tokens=max_batch_tokens, use_cuda_graph=False
    )
    prompts = [prompt.tolist() for prompt in PROMPTS]
    prompts[-1] = prompts[2][:48] + prompts[-1]  # shares whole pages with another
    done = made.generate_batch(
        prompts,
        generation_config=settings,
        continuous_batching_config=engine,
        progress_bar=False,
    )
    in_order = sorted(done, key=lambda name: int(name.split("_")[-1]))
    return [done[name].generated_tokens for name in in_order]


@functools.cache
def batched_by_eager(family: str, max_batch_tokens: int) -> list[list[int]]:
    return batched(with_attention(family, "eager"), max_batch_tokens)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("family", MODELS)
def test_continuous_batching_gives_the_tokens_of_eager(family, engine):
    expected = batched_by_eager(family, ENGINES[engine])
    made = model(family, **MODELS[family])
    ours.use_pages(made)
    got = batched(made, ENGINES[engine])
    assert got == expected
    assert sum(map(len, got)) == 24 * len(PROMPTS)


def test_pages_are_read_in_place(monkeypatch):
    """transformers' own way, which gathers all keys, is not taken."""
    monkeypatch.setattr(PagedAttentionCache, "update", None)
    made = model("Qwen3")
    ours.use_pages(made)
    assert sum(map(len, batched(made, 256))) == 24 * len(PROMPTS)


def test_pages_are_for_continuous_batching_alone():
    made = model("Qwen3")
    ours.use_pages(made)
    with pytest.raises(UnsupportedError, match="generate_batch"), torch.no_grad():
        made(IDS)
    assert torch.equal(generated("Qwen3", NAME)[0], generated("Qwen3", "eager")[0])
