"""Every family against transformers: tiny random models, saved by it, served by the example."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pagedattn_serving.blocks.limits import Limits
from pagedattn_serving.checkpoint.folder import SHIPPED, load_checkpoint, save_checkpoint
from pagedattn_serving.decoding.beam import Beam
from pagedattn_serving.decoding.request import Request
from pagedattn_serving.decoding.sampling import GREEDY
from pagedattn_serving.demo.parity import dense_logits
from pagedattn_serving.demo.prompts import PROMPTS
from pagedattn_serving.engine.engine import Engine
from pagedattn_serving.engine.preemption import Recompute, Swap
from pagedattn_serving.families import model_of
from pagedattn_serving.families.fused import fused
from safetensors.flax import load_file, save_file
from tiny import QUICK, greedy_completions, serve

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.23")
ROPE_INIT_FUNCTIONS = pytest.importorskip("transformers.modeling_rope_utils").ROPE_INIT_FUNCTIONS

pytestmark = pytest.mark.usefixtures("exact_products")
SWAP = partial(Swap, num_blocks=24, num_rows=6)
LIMITS = Limits(
    num_blocks=12, block_size=4, max_seq_len=40, max_seqs=4, token_budget=12, max_query_len=8
)
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
THETA = {"rope_theta": 100.0}
LLAMA3 = THETA | {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = THETA | {"rope_type": "linear", "factor": 2.0}
YARN = THETA | {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 0.1,
    "original_max_position_embeddings": 16,
}
YARN_MLA = YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
MLA = SIZES | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GROUPS = {"n_group": 4, "topk_group": 2}
BLOOM = {"vocab_size": 40, "hidden_size": 40, "n_layer": 2, "n_head": 5, "eos_token_id": None}
UNTRUNCATED = YARN | {"truncate": False}
LLAMA_3_2 = {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
BY_TURNS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LOCAL = {"rope_type": "default", "rope_theta": 30.0}
TWO_ROPES = {"full_attention": LINEAR, "sliding_attention": LOCAL}
YARN_ABOVE = {"full_attention": YARN, "sliding_attention": THETA | {"rope_type": "default"}}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CLAMPED = {"swiglu_limit": 1.0, "swiglu_alpha": 1.3}
NARROW = {"num_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}
CONFIGS = {
    "llama": ("Llama", SIZES),
    "llama 3": ("Llama", SIZES | LLAMA_3_2),
    "mistral": ("Mistral", SIZES | {"sliding_window": 6, "rope_parameters": LINEAR}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2 sliding": ("Qwen2", SIZES | SLIDING),
    "qwen3": ("Qwen3", SIZES | SLIDING | {"attention_bias": True}),
    "gemma2": ("Gemma2", SIZES | {"sliding_window": 6, "query_pre_attn_scalar": 20}),
    "gemma3": (
        "Gemma3Text",
        SIZES | BY_TURNS | {"query_pre_attn_scalar": 20, "rope_parameters": TWO_ROPES},
    ),
    "gpt-oss": (
        "GptOss",
        SIZES | EXPERTS | CLAMPED | {"sliding_window": 6} | {"rope_parameters": UNTRUNCATED},
    ),
    "phi3": ("Phi3", SIZES | {"sliding_window": 6}),
    "qwen3 moe": ("Qwen3Moe", SIZES | NARROW | {"norm_topk_prob": True}),
    "qwen3 moe sliding": ("Qwen3Moe", SIZES | NARROW | SLIDING),
    "mixtral": ("Mixtral", SIZES | EXPERTS),
    "olmo2": ("Olmo2", SIZES),
    "olmo3": ("Olmo3", SIZES | BY_TURNS | {"rope_parameters": YARN_ABOVE}),
    "granite": ("Granite", SIZES | MULTIPLIERS),
    "smollm3": ("SmolLM3", SIZES | {"no_rope_layers": [1, 0]}),
    "cohere": ("Cohere", SIZES | {"rope_parameters": LLAMA3}),
    "cohere2": ("Cohere2", SIZES | BY_TURNS),
    "bloom": ("Bloom", BLOOM),
    "deepseek v3": (
        "DeepseekV3",
        MLA | GROUPS | {"rope_parameters": YARN_MLA, "attention_bias": True},
    ),
    "deepseek v3, plain": (
        "DeepseekV3",
        MLA | {"n_group": 1, "topk_group": 1, "q_lora_rank": None, "rope_interleave": False},
    ),
    "deepseek v2": (
        "DeepseekV2",
        MLA | GROUPS | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    ),
    "deepseek v2 lite": ("DeepseekV2", MLA | {"q_lora_rank": None, "n_shared_experts": 2}),
}
# What published configs say beside their sizes: names from before transformers 5, and odd ones.
PUBLISHED = {
    "gemma3_text": {
        "cache_implementation": "hybrid",
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rope_theta": 1000000,
        "sliding_window": 6,
        "sliding_window_pattern": 2,
    },
    "gpt_oss": {
        "experts_per_token": 4,
        "initial_context_length": 4096,
        "num_experts_per_tok": 4,
        "num_local_experts": 32,
        "rope_theta": 150000,  # and no scaling: its own stands
        "router_aux_loss_coef": 0.9,
        "sliding_window": 6,
        "swiglu_limit": 7.0,
    },
    "deepseek_v3": {
        **MLA,
        "aux_loss_alpha": 0.001,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "ep_size": 1,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "rope_scaling": {k: v for k, v in YARN_MLA.items() if k not in ("rope_theta", "rope_type")}
        | {"type": "yarn"},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
    "deepseek_v2": {
        **MLA,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_group": 1,
        "topk_method": "greedy",
    },
    "qwen3_moe": {
        "decoder_sparse_step": 1,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 16,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "smollm3": {
        "max_window_layers": 28,
        "no_rope_layer_interval": 2,
        "no_rope_layers": [1, 0],
        "pretraining_tp": 2,
        "rope_theta": 5000000.0,
        "use_sliding_window": False,
    },
    "olmo3": {
        "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"},
        "rope_theta": 500000,
        "sliding_window": 6,
    },
    "cohere2": {
        "layer_switch": 4,
        "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj",
        "rope_theta": 50000,
        "rotary_pct": 1.0,
        "sliding_window": 6,
        "sliding_window_pattern": 4,
        "use_embedding_sharing": True,
        "use_gated_activation": True,
        "use_parallel_block": True,
    },
    "mistral": {"sliding_window": 6, "rope_theta": 10000.0, "torch_dtype": "bfloat16"},
    "phi3": {
        "_name_or_path": "Phi-3-mini-4k-instruct",
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "attention_bias": False,
        "original_max_position_embeddings": 4096,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 6,
    },
}
QKV = {"query", "key", "value"}
QKV_BIASES = {f"{name}_bias" for name in QKV}
FUSED_IN = {
    "llama": QKV | {"gate", "up"},
    "qwen2": QKV | QKV_BIASES | {"gate", "up"},
    "gpt-oss": QKV | QKV_BIASES,
    "mixtral": QKV,
}
# Which between them have each option of attention.
BY_XLA = ("llama", "gemma2", "gpt-oss", "bloom")


@dataclass(frozen=True)
class Theirs:
    """A model of transformers."""

    model: "transformers.PreTrainedModel"

    def greedy(self, request: Request) -> list[int]:
        return self.generate(request, do_sample=False)[0]

    def generate(self, request: Request, **how) -> list[list[int]]:
        prompt = torch.tensor([request.prompt])
        out = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=request.max_new_tokens,
            **how,
        )
        return out[:, prompt.shape[1] :].tolist()

    def logits(self, tokens) -> np.ndarray:
        with torch.no_grad():
            return self.model(torch.tensor([list(tokens)])).logits[0].float().numpy()


def theirs(case: str, **changes) -> Theirs:
    """A random model in which every parameter counts, norms and biases included."""
    family, sizes = CONFIGS[case]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | changes, initializer_range=0.3)
    config._attn_implementation = "eager"  # the only one of theirs that caps logits
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("bias") or (tensor.ndim == 1 and "inv_freq" not in name):
                tensor.add_(0.2 * torch.randn_like(tensor))
    return Theirs(model)


def shared_prefix_requests() -> list[Request]:
    rng = np.random.default_rng(1)
    prefix = tuple(rng.integers(40, size=10).tolist())
    tails = [tuple(rng.integers(40, size=length).tolist()) for length in (1, 14, 3, 6, 2)]
    requests = [Request(i, prefix + tail, 9 + i, GREEDY) for i, tail in enumerate(tails)]
    return [*requests, Request(len(tails), tails[1][:3], 12, GREEDY)]


def served(directory: Path, requests, preemption, backend=QUICK, dtype=jnp.float32):
    """Completions and the logits behind them, of a batch that shares, and that does not fit."""
    model, params = load_checkpoint(directory, dtype)
    engine = Engine(fused(params), model, LIMITS, backend, preemption)
    steps = serve(engine, requests)
    assert engine.scheduler.num_preemptions > 0 or None not in model.windows  # these always fit
    assert engine.prefixes.num_hit_tokens > 0
    scores = {
        r.id: np.concatenate([step.scores[r.id] for step in steps if r.id in step.scores])
        for r in requests
    }
    return greedy_completions(engine), scores


def check(judge: Theirs, requests, completions, scores) -> None:
    """Their logits behind each of our tokens, to float32's precision through the layers."""
    for request in requests:
        completion = completions[request.id]
        expected = judge.logits([*request.prompt, *completion])[len(request.prompt) - 1 : -1]
        scale = np.abs(expected).max()
        np.testing.assert_allclose(scores[request.id], expected, atol=1e-4 * scale)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_family_answers_as_transformers_does(tmp_path, name):
    judge, requests = theirs(name), shared_prefix_requests()
    judge.model.save_pretrained(tmp_path)
    policy = SWAP if len(name) % 2 else Recompute
    backend = "xla" if name in BY_XLA else QUICK
    completions, scores = served(tmp_path, requests, policy, backend)
    assert completions == {request.id: judge.greedy(request) for request in requests}
    check(judge, requests, completions, scores)


@pytest.mark.parametrize("name", BY_XLA)
def test_torch_serves_them_too(tmp_path, name):
    pytest.importorskip("jax_tvm_ffi")
    judge, requests = theirs(name), shared_prefix_requests()
    judge.model.save_pretrained(tmp_path)
    check(judge, requests, *served(tmp_path, requests, Recompute, backend="sdpa"))


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt-oss", "mixtral", "phi3", "bloom"])
def test_fused_weights_compute_the_same(tmp_path, name):
    judge, (request, *_) = theirs(name), shared_prefix_requests()
    judge.model.save_pretrained(tmp_path)
    model, params = load_checkpoint(tmp_path)
    together = fused(params)
    assert sum(leaf.size for leaf in jax.tree.leaves(together)) == sum(
        leaf.size for leaf in jax.tree.leaves(params)
    )
    changed = set(params["layers"][0]) - set(together["layers"][0])
    assert changed == FUSED_IN.get(name, set())
    ours, apart = (dense_logits(p, model, jnp.array([request.prompt])) for p in (together, params))
    np.testing.assert_allclose(ours, apart, atol=1e-5 * np.abs(apart).max())


def test_sinks_and_experts_need_no_cache(tmp_path):
    judge, (request, *_) = theirs("gpt-oss"), shared_prefix_requests()
    judge.model.save_pretrained(tmp_path)
    model, params = load_checkpoint(tmp_path)
    expected = judge.logits(request.prompt)
    dense = dense_logits(params, model, jnp.array([request.prompt]))[0]
    np.testing.assert_allclose(dense, expected, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": LINEAR},
        {"rope_parameters": LLAMA3},
        {"rope_parameters": YARN},
        {"rope_parameters": UNTRUNCATED},
        {"rope_parameters": YARN | {"attention_factor": 0.7}},
        {"rope_parameters": YARN_MLA},
        {"rope_parameters": YARN | {"beta_fast": 32, "beta_slow": 1, "factor": 0.5}},
        {"rope_parameters": YARN | {"original_max_position_embeddings": 4096}, "head_dim": 128},
    ],
)
def test_scaled_frequencies_are_those_of_transformers(changes):
    config = transformers.LlamaConfig(**SIZES | changes)
    kind = config.rope_parameters["rope_type"]
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    model = model_of(json.loads(config.to_json_string()))
    half = model.head_dim // 2
    frequencies = model.rope_scaling(model.rope_theta ** (-np.arange(half) / half))
    np.testing.assert_allclose(frequencies, expected.numpy(), rtol=1e-5)
    assert model.rope_scaling.magnitude == pytest.approx(magnitude)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_a_published_config_means_what_transformers_makes_of_it(kind):
    raw = SIZES | {"model_type": kind} | PUBLISHED[kind]
    theirs = transformers.AutoConfig.for_model(kind).from_dict(raw)
    assert model_of(raw) == model_of(json.loads(theirs.to_json_string()))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_is_what_was_loaded(tmp_path, name):
    theirs(name).model.save_pretrained(tmp_path / "theirs")
    model, params = load_checkpoint(tmp_path / "theirs")
    save_checkpoint(tmp_path / "ours", model, params, jnp.float32)
    again, same = load_checkpoint(tmp_path / "ours")
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, same, params)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_errs_no_more_than_transformers_does(tmp_path, name):
    rounded, requests = theirs(name), shared_prefix_requests()
    rounded.model.bfloat16().save_pretrained(tmp_path)
    exact = Theirs(type(rounded.model).from_pretrained(tmp_path, dtype=torch.float32))
    backend = "xla" if name == "llama" else QUICK
    completions, scores = served(tmp_path, requests, SWAP, backend, dtype=jnp.bfloat16)
    our_errors, their_errors = [], []
    for request in requests:
        tokens = [*request.prompt, *completions[request.id]]
        new = slice(len(request.prompt) - 1, -1)
        expected = exact.logits(tokens)[new]
        our_errors.append(np.ravel(scores[request.id] - expected))
        their_errors.append(np.ravel(rounded.logits(tokens)[new] - expected))
    ours, others = (np.concatenate(errors).std() for errors in (our_errors, their_errors))
    assert 0 < ours <= 1.5 * others


def test_layers_for_later_tokens_are_left_out(tmp_path):
    theirs("deepseek v3").model.save_pretrained(tmp_path)
    model, params = load_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    later = {name.replace("layers.1.", "layers.2."): tensor for name, tensor in tensors.items()}
    save_file(later | tensors, tmp_path / "model.safetensors")
    again, same = load_checkpoint(tmp_path)
    assert again == model
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_shards_are_one_checkpoint(tmp_path):
    judge = theirs("qwen3")
    judge.model.save_pretrained(tmp_path / "whole")
    judge.model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    whole, sharded = (load_checkpoint(tmp_path / name)[1] for name in ("whole", "shards"))
    assert whole.keys() == sharded.keys()
    for ours, other in zip(whole["layers"], sharded["layers"], strict=True):
        for name in ours:
            np.testing.assert_array_equal(ours[name], other[name])


def test_a_shard_elsewhere_is_refused(tmp_path):
    theirs("llama").model.save_pretrained(tmp_path)
    index = {"weight_map": {"model.norm.weight": "../secret.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="beside their index"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("saved_as", "read_as", "message"),
    [
        ("llama 3", {"attention_bias": False}, "would not be used"),
        ("llama", {"attention_bias": True}, "lacks"),
        ("llama", {"num_hidden_layers": 1}, "would not be used"),
        ("llama", {"num_hidden_layers": 3}, "lacks"),
        ("qwen3", {"model_type": "qwen2"}, "q_norm"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation"),
        ("bloom", {"apply_residual_connection_post_layernorm": True}, "post_layernorm"),
        ("llama", {"model_type": "mamba"}, "llama, mistral, .*gpt_oss, .*bloom, got 'mamba'"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized"),
        ("llama", {"quantization_config": {"quant_method": "mxfp4"}}, "quantized"),
        ("llama", {"hidden_act": "relu"}, "hidden_act"),
        ("llama", {"sliding_window": 4}, "sliding_window"),
        ("llama", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("llama", {"clip_qkv": 8.0, "residual_multiplier": 0.5}, "clip_qkv, residual_multiplier"),
        ("mistral", {"attention_bias": True}, "attention_bias"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ("phi3", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
        ("qwen3 moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("qwen3 moe", {"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ("qwen3 moe", {"num_local_experts": 5}, "lacks"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window"),
        ("deepseek v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek v2", {"norm_topk_prob": True}, "norm_topk_prob"),
        ("deepseek v3", {"num_hidden_layers": 1, "num_nextn_predict_layers": 0}, "not be used"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere2", {"use_parallel_block": False}, "use_parallel_block"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"rope_parameters": TWO_ROPES | {"sliding_attention": LINEAR}}, "scaled"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, saved_as, read_as, message):
    theirs(saved_as).model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | read_as))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("said", ["by both", "by both, several", "by the config alone"])
def test_a_text_ends_where_that_of_transformers_does(tmp_path, said):
    """At what the folder says of generation, before what its config says."""
    judge, requests = theirs("llama"), shared_prefix_requests()
    whole = [judge.greedy(request) for request in requests]
    late, *early = whole[1][6], whole[1][2], whole[4][5]
    settings = {"by both": early[0], "by both, several": early}
    judge.model.config.eos_token_id = late
    judge.model.generation_config.eos_token_id = settings.get(said, late)
    judge.model.save_pretrained(tmp_path)
    if said not in settings:
        (tmp_path / "generation_config.json").unlink()
    model, params = load_checkpoint(tmp_path)
    engine = Engine(params, model, LIMITS, QUICK)
    serve(engine, requests)
    completions = greedy_completions(engine)
    assert completions == {request.id: judge.greedy(request) for request in requests}
    assert len(completions[1]) < len(whole[1])


def test_beams_are_those_of_transformers(tmp_path):
    judge = theirs("llama")
    judge.model.save_pretrained(tmp_path)
    model, params = load_checkpoint(tmp_path)
    model = replace(model, eos_token_id=(3, 5, 8, 13, 21))
    requests = [replace(r, decoding=Beam(3)) for r in shared_prefix_requests()[::2]]
    engine = Engine(params, model, replace(LIMITS, num_blocks=40), QUICK)
    serve(engine, requests)
    how = {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True, "pad_token_id": 39}
    for request in requests:
        beams = judge.generate(request, eos_token_id=list(model.stop_tokens), **how)
        stripped = [[token for token in beam if token != 39] for beam in beams]
        assert engine.completions[request.id] == stripped


def test_the_shipped_model_writes_what_transformers_writes():
    judge = Theirs(transformers.LlamaForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32))
    model, params = load_checkpoint(SHIPPED)
    requests = [
        Request(i, tuple(PROMPTS[i].encode()), new, GREEDY)
        for i, new in ((0, 40), (2, 60), (10, 30), (13, 50))
    ]
    limits = Limits(num_blocks=36, block_size=16, max_seq_len=400, max_seqs=4)
    engine = Engine(params, model, limits, QUICK)
    serve(engine, requests)
    expected = {request.id: judge.greedy(request) for request in requests}
    assert greedy_completions(engine) == expected
