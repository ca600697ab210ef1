"""transformers' models on this library's attention: the tokens and logits of transformers' own."""

import copy
import functools
import gc
import importlib
import weakref
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.23")

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache

import pagedattn_torch.transformers as ours
from pagedattn import AttentionSpec, BackendUnavailableError, UnsupportedError
from pagedattn_torch.transformers import paged, shared

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
    "chosen blocks": (
        {"block_indices": torch.zeros(3, 2, 12, 1, dtype=torch.int64)},
        "block_indices",
    ),
    "chosen keys": ({"indices": torch.zeros(3, 12, 1, dtype=torch.int64)}, "indices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_result_is_refused(name):
    inputs, word = REFUSED[name]
    with pytest.raises(UnsupportedError, match=word):
        logits("Llama", NAME, **inputs)


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
    nondecreasing_starts = sorted(done, key=lambda name: int(name.split("_")[-1]))
    return [done[name].generated_tokens for name in nondecreasing_starts]


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


def test_batch_invariant_is_asked_for_in_forward():
    made = copy.deepcopy(model("Qwen3"))
    ours.use(made, backend="sdpa", batch_invariant=True)
    with pytest.raises(UnsupportedError, match="batch_invariant: sdpa"), torch.no_grad():
        made(IDS)


@pytest.mark.parametrize("use", [ours.use, ours.use_pages])
def test_models_keep_their_own_options(use):
    """Whatever others of the process are given, before or after."""
    asked = [{"backend": "sdpa"}, {"batch_invariant": True}, {}, {"backend": "sdpa"}]
    models = [copy.deepcopy(model("Qwen3")) for _ in asked]
    for made, options in zip(models, asked, strict=True):
        use(made, **options)
    for made, options in zip(models, asked, strict=True):
        function = transformers.AttentionInterface()[made.config._attn_implementation]
        assert function.keywords == {"backend": None, "batch_invariant": False} | options


def test_batch_invariant_is_asked_for_over_pages(monkeypatch):
    asked = []

    def spy(*arrays, batch_invariant, **options):
        asked.append(batch_invariant)
        return prepare(*arrays, **options)

    prepare = shared.prepare
    monkeypatch.setattr(shared, "prepare", spy)
    for flag in (True, False):
        made = copy.deepcopy(model("Qwen3"))
        ours.use_pages(made, batch_invariant=flag)
        batched(made, 256)
    half = len(asked) // 2
    assert half
    assert asked == [True] * half + [False] * half


@pytest.mark.parametrize("use", [ours.use, ours.use_pages])
def test_batch_invariant_is_refused_where_caches_drop_keys(use):
    """What is left has other positions, and so other chunks."""
    made = copy.deepcopy(model("Mistral", **MODELS["Mistral"]))
    use(made, batch_invariant=True)
    with pytest.raises(UnsupportedError, match="sliding_window=7"), torch.no_grad():
        made(IDS)


@pytest.mark.parametrize("family", ["Qwen3", "Gemma2"])  # without and with sliding layers
def test_the_layers_of_a_step_share_its_batch_and_its_plan(family, monkeypatch):
    made = model(family, **MODELS[family])
    ours.use_pages(made)
    counts = dict.fromkeys(("steps", "batches", "plans"), 0)

    def counted(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    for make in ("_in_place", "_gathered"):
        monkeypatch.setattr(paged, make, counted("batches", getattr(paged, make)))
    monkeypatch.setattr(shared, "prepare", counted("plans", shared.prepare))
    monkeypatch.setattr(made.model, "forward", counted("steps", made.model.forward))
    batched(made, 32)
    kinds = len(set(made.config.layer_types))
    assert counts["steps"] > 24
    assert counts["batches"] == counts["plans"] == kinds * counts["steps"]


class OneLayer:
    """A paged cache of one layer, as far as attention asks for it."""

    layer_type, index = "full_attention", 0

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.pages = tuple(torch.randn(8, 2, 1, 8, generator=generator) for _ in range(2))
        self.layer_to_allocator = {0: self}

    def get_cache_for_block_table(self, layer):
        return self.pages


def step_of(starts, key_starts, written, read):
    return {
        "cu_seq_lens_q": torch.tensor(starts, dtype=torch.int32),
        "cu_seq_lens_k": {"full_attention": torch.tensor(key_starts, dtype=torch.int32)},
        "max_length_q": 2,
        "write_index": [torch.tensor(written)],
        "read_index": [torch.tensor(read)],
    }


def attended(step) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(1, 1, 3, 8, generator=generator) for _ in range(3))
    cache: Any = OneLayer()
    call = 0, query, key, value, cache, step, AttentionSpec(), None
    return paged.attend_paged(*call, backend="sdpa", batch_invariant=False)


STEPS = [
    step_of([0, 1, 3], [0, 3, 6], [4, 8, 9], [2, 3, 4, 10, 8, 9]),
    step_of([0, 2, 3], [0, 3, 6], [3, 4, 9], [2, 3, 4, 10, 11, 9]),
    step_of([0, 2, 3], [0, 2, 6], [3, 4, 9], [3, 4, 12, 13, 10, 9]),
]


def leaves(step) -> list[torch.Tensor]:
    tensors = step["cu_seq_lens_q"], step["cu_seq_lens_k"]["full_attention"]
    return [*tensors, *step["write_index"], *step["read_index"]]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("changed", range(1, 16))  # which of the four arrays, as bits
def test_a_step_that_is_changed_in_place_is_a_new_one(changed, inference):
    with torch.inference_mode(inference):
        step, after = copy.deepcopy(STEPS[:2])
        fresh = copy.deepcopy(STEPS[0])
        attended(step)
        for bit, tensors in enumerate(zip(leaves(step), leaves(fresh), leaves(after), strict=True)):
            if changed & 1 << bit:
                for tensor in tensors[:2]:
                    tensor.copy_(tensors[2])
        assert torch.equal(attended(step), attended(fresh))


@pytest.mark.parametrize("given", [1, 2])
def test_a_step_of_other_tensors_is_a_new_one(given):
    """Whatever tensor it shares with the one before."""
    step = copy.deepcopy(STEPS[given])
    shared_starts = copy.deepcopy(STEPS[3 - given])["cu_seq_lens_q"]
    attended(step | {"cu_seq_lens_q": shared_starts})
    other = copy.deepcopy(STEPS[3 - given]) | {"cu_seq_lens_q": shared_starts}
    assert torch.equal(attended(other), attended(copy.deepcopy(STEPS[3 - given])))


def test_what_a_step_holds_goes_with_it():
    step = copy.deepcopy(STEPS[0])
    attended(step)
    gone = weakref.ref(step["cu_seq_lens_q"])
    enabled = gc.isenabled()
    gc.disable()
    try:
        del step
        assert gone() is None
    finally:
        if enabled:
            gc.enable()


@pytest.mark.parametrize("version", ["4.57.6", "5.3.0", "5.4.0.dev0"])
def test_versions_that_ask_for_masks_in_another_way_are_refused(version, monkeypatch):
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(
        BackendUnavailableError, match=rf"5\.4 or newer, got {version}: pip install"
    ):
        importlib.reload(ours)


def test_versions_of_other_pages_are_refused(monkeypatch):
    monkeypatch.setattr(transformers, "__version__", "5.18.0")
    with pytest.raises(BackendUnavailableError, match=r"use_pages needs transformers 5\.19"):
        ours.use_pages(model("Qwen3"))
