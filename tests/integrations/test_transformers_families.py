"""Small models of many families: transformers' eager results, or an error that says why not."""

import functools

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")

import pagedattn_torch.transformers as ours
from pagedattn import UnsupportedError
from pagedattn_torch.transformers import interface

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {
    "num_local_experts": 2,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 16,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
UNGROUPED = {"num_key_value_heads": 4}  # for transformers' paged cache, which asks for it
GEMMA = MIXED | {"query_pre_attn_scalar": 16, "head_dim": 8}

# Names of classes before Config, and before ForCausalLM where those differ.
DECODERS = {
    "Cohere": {},
    "Cohere2": MIXED,
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT,
    "Ernie4_5": {},
    "Exaone4": MIXED,
    "GPT2/GPT2LMHeadModel": UNGROUPED,
    "GPTBigCode": {"num_key_value_heads": 1},
    "GPTNeoX": UNGROUPED,
    "Gemma": {"head_dim": 8},
    "Gemma2": GEMMA | {"attn_logit_softcapping": 1.5},
    "Gemma3Text/Gemma3ForCausalLM": GEMMA,
    "Glm4": {"head_dim": 8},
    "GptOss": EXPERTS | MIXED,
    "Granite": {},
    "HunYuanDenseV1": {"head_dim": 8},
    "Lfm2": {"layer_types": ["conv", "full_attention"]},
    "Llama": {},
    "Ministral": MIXED | {"head_dim": 8},
    "Mistral": {"sliding_window": 4},
    "Mixtral": EXPERTS | {"sliding_window": 4},
    "ModernBertDecoder": UNGROUPED | {"local_attention": 8},
    "Nemotron": {},
    "OPT": UNGROUPED | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": {"sliding_window": 4},
    "Persimmon": UNGROUPED,
    "Phi": {},
    "Phi3": {"sliding_window": 4},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": EXPERTS | {"head_dim": 8},
    "SmolLM3": {},
    "StableLm": {},
    "Starcoder2": {"sliding_window": 4},
}
# Of which transformers' own continuous batching runs none.
UNPAGED = {"DeepseekV2", "DeepseekV3", "Lfm2", "Nemotron", "StableLm"}
ENCODERS = {
    "Bert": {},
    "Electra": {"embedding_size": 32},
    "EuroBert": {},
    "Gemma3Text": GEMMA | {"use_bidirectional_attention": True},
    "ModernBert": {"local_attention": 4, "global_attn_every_n_layers": 2},
    "Roberta": {},
}
HALVES = {
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "d_model": 32,
    "forced_eos_token_id": None,
    "decoder_start_token_id": 1,
}
SOUNDS = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
SEQ2SEQ = {
    "Bart": HALVES,
    "MBart": HALVES,
    "Marian/MarianMTModel": HALVES,
    "Pegasus": HALVES,
    "Whisper": HALVES | SOUNDS | {"begin_suppress_tokens": None, "suppress_tokens": None},
}
REFUSED = {
    "Llama4Text/Llama4ForCausalLM": (
        EXPERTS | {"attention_chunk_size": 4, "intermediate_size_mlp": 16, "head_dim": 8},
        "chunks",
    ),
    "T5/T5ForConditionalGeneration": (
        {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4},
        "position_bias",
    ),
}
ALONE = {"Bloom": {}, "Falcon": {}, "GPTJ": {"rotary_dim": 8}, "Mpt": {}}
OTHERS = DECODERS | SEQ2SEQ | {name: options for name, (options, _) in REFUSED.items()} | ALONE

IDS = torch.randint(2, 97, (3, 9), generator=torch.Generator().manual_seed(0))
LEFT = torch.tensor([[0] * 5 + [1] * 4, [1] * 9, [0] + [1] * 8])
PADDED = torch.tensor([[0] * 5 + [1] * 4, [1] * 9, [1] * 6 + [0] * 3])  # on either side
TOLERANCE = {"rtol": 0, "atol": 1e-5}


@functools.cache
def model(family: str, kind: str):
    name, _, of_model = family.partition("/")
    options = SIZES | (ENCODERS if kind == "Model" else OTHERS)[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**options)
    return getattr(transformers, of_model or name + kind)(config).eval()


def both(made, run, monkeypatch):
    """What a model gives with this library's attention, which must have run, and with eager's."""
    made.set_attn_implementation("eager")
    expected = run()
    calls = []
    attend = interface.attend_padded
    monkeypatch.setattr(
        interface, "attend_padded", lambda *a, **k: calls.append(a) or attend(*a, **k)
    )
    ours.use(made)
    got = run()
    assert calls
    return got, expected


def generated(made, inputs, **settings):
    """The logits of each step of generation."""
    settings |= {"max_new_tokens": 7, "do_sample": False, "disable_compile": True}
    settings |= {"output_scores": True, "return_dict_in_generate": True}
    return torch.stack(made.generate(**inputs, **settings).scores)


@pytest.mark.parametrize("family", DECODERS)
@torch.no_grad()
def test_decoders_give_the_logits_of_eager(family, monkeypatch):
    made, real = model(family, "ForCausalLM"), PADDED.bool()
    got, expected = both(made, lambda: made(IDS, attention_mask=PADDED).logits, monkeypatch)
    torch.testing.assert_close(got[real], expected[real], **TOLERANCE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", DECODERS)
def test_decoders_generate_as_eager_does(family, cache, monkeypatch):
    made = model(family, "ForCausalLM")
    inputs = {"input_ids": IDS * LEFT, "attention_mask": LEFT}
    run = functools.partial(generated, made, inputs, cache_implementation=cache)
    torch.testing.assert_close(*both(made, run, monkeypatch), **TOLERANCE)


def batched(made) -> list[list[int]]:
    """The tokens that continuous batching generates, of prompts in chunks of 16 tokens."""
    made = made.to("cuda" if torch.cuda.is_available() else "cpu")
    done = made.generate_batch(
        [[5, 6, 7], list(range(3, 22)), [9] * 9],
        generation_config=transformers.GenerationConfig(
            max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            page_size=4, num_blocks=64, max_batch_tokens=16, use_cuda_graph=False
        ),
        progress_bar=False,
    )
    made.to("cpu")
    return [result.generated_tokens for _, result in sorted(done.items())]


@pytest.mark.parametrize("family", sorted(DECODERS.keys() - UNPAGED))
def test_continuous_batching_gives_the_tokens_of_eager(family):
    made = model(family, "ForCausalLM")
    made.set_attn_implementation("eager")
    expected = batched(made)
    ours.use_pages(made)
    assert batched(made) == expected
    assert [len(tokens) for tokens in expected] == [6, 6, 6]


@pytest.mark.parametrize("family", ENCODERS)
@torch.no_grad()
def test_encoders_give_the_states_of_eager(family, monkeypatch):
    made, real = model(family, "Model"), PADDED.bool()
    run = lambda: made(IDS, attention_mask=PADDED).last_hidden_state  # noqa: E731
    got, expected = both(made, run, monkeypatch)
    torch.testing.assert_close(got[real], expected[real], **TOLERANCE)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", SEQ2SEQ)
def test_encoders_with_decoders_generate_as_eager_does(family, cache, monkeypatch):
    made = model(family, "ForConditionalGeneration")
    inputs = {"input_ids": IDS, "attention_mask": PADDED}
    if family == "Whisper":
        sounds = torch.randn(2, 8, 24, generator=torch.Generator().manual_seed(0))
        inputs = {"input_features": sounds, "decoder_input_ids": IDS[:2, :2]}
    run = functools.partial(generated, made, inputs, cache_implementation=cache)
    torch.testing.assert_close(*both(made, run, monkeypatch), **TOLERANCE)


@pytest.mark.parametrize("family", REFUSED)
@torch.no_grad()
def test_a_refusal_names_what_is_missing(family):
    made = model(family, "")
    ours.use(made)
    with pytest.raises(UnsupportedError, match=REFUSED[family][1]):
        made(IDS, **({"decoder_input_ids": IDS} if made.config.is_encoder_decoder else {}))


@pytest.mark.parametrize("call", [ours.use, ours.use_pages])
@pytest.mark.parametrize("family", ALONE)
def test_models_that_attend_by_themselves_are_refused(family, call):
    """Without masks of its own, Bloom would let tokens of continuous batching see each other."""
    made = model(family, "ForCausalLM")
    before = made.config._attn_implementation
    with pytest.raises(UnsupportedError, match=f"{family}ForCausalLM.*by itself"):
        call(made)
    assert made.config._attn_implementation == before


def test_a_mask_with_which_a_model_computes_is_refused():
    """As Bloom does where it is loaded with this library's name."""
    config = model("Bloom", "ForCausalLM").config
    name = ours.register()
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name).eval()
    with pytest.raises(UnsupportedError, match="computes with its mask"), torch.no_grad():
        made(IDS)
