"""Every family against transformers: tiny random models, saved by it, served by the example."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from serving.beam import Beam
from serving.checkpoint import load_checkpoint
from serving.engine import Engine
from serving.limits import Limits
from serving.preemption import Recompute, Swap
from serving.prompts import PROMPTS
from serving.request import Request
from serving.sampling import GREEDY
from tiny import greedy_completions, serve

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("exact_products")
SHIPPED = Path(__file__).parents[2] / "examples" / "models" / "pydoc-llama"
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
    "truncate": False,
}
BLOOM = {"vocab_size": 40, "hidden_size": 40, "n_layer": 2, "n_head": 5, "eos_token_id": None}
LLAMA_3_2 = {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True}
SLIDING = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
BY_TURNS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
LOCAL = {"rope_type": "default", "rope_theta": 30.0}
TWO_ROPES = {"full_attention": LINEAR, "sliding_attention": LOCAL}
YARN_ABOVE = {"full_attention": YARN, "sliding_attention": THETA | {"rope_type": "default"}}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
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
    "gpt-oss": ("GptOss", SIZES | EXPERTS | {"sliding_window": 6, "rope_parameters": YARN}),
    "phi3": ("Phi3", SIZES | {"sliding_window": 6}),
    "qwen3 moe": ("Qwen3Moe", SIZES | NARROW | {"norm_topk_prob": True}),
    "qwen3 moe sliding": ("Qwen3Moe", SIZES | NARROW | SLIDING),
    "mixtral": ("Mixtral", SIZES | EXPERTS),
    "olmo2": ("Olmo2", SIZES),
    "olmo3": ("Olmo3", SIZES | BY_TURNS | {"rope_parameters": YARN_ABOVE}),
    "granite": ("Granite", SIZES | MULTIPLIERS),
    "bloom": ("Bloom", BLOOM),
}


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


def theirs(case: str, seed: int = 0) -> Theirs:
    """A random model in which every parameter counts, norms and biases included."""
    family, sizes = CONFIGS[case]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**sizes, initializer_range=0.3)
    config._attn_implementation = "eager"  # the only one of theirs that caps logits
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return Theirs(model)


def shared_prefix_requests() -> list[Request]:
    rng = np.random.default_rng(1)
    prefix = tuple(rng.integers(40, size=10).tolist())
    tails = [tuple(rng.integers(40, size=length).tolist()) for length in (1, 14, 3, 6, 2)]
    requests = [Request(i, prefix + tail, 9 + i, GREEDY) for i, tail in enumerate(tails)]
    return [*requests, Request(len(tails), tails[1][:3], 12, GREEDY)]


def served(directory: Path, requests, preemption, backend="xla", dtype=jnp.float32):
    """Completions and the logits behind them, of a batch that shares, and that does not fit."""
    model, params = load_checkpoint(directory, dtype)
    engine = Engine(params, model, LIMITS, backend, preemption)
    steps = serve(engine, requests)
    assert engine.scheduler.num_preemptions > 0
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
    completions, scores = served(tmp_path, requests, policy)
    assert completions == {request.id: judge.greedy(request) for request in requests}
    check(judge, requests, completions, scores)


def test_torch_serves_them_too(tmp_path):
    pytest.importorskip("jax_tvm_ffi")
    judge, requests = theirs("gemma2"), shared_prefix_requests()
    judge.model.save_pretrained(tmp_path)
    check(judge, requests, *served(tmp_path, requests, Recompute, backend="sdpa"))


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bfloat16_errs_no_more_than_transformers_does(tmp_path, name):
    rounded, requests = theirs(name), shared_prefix_requests()
    rounded.model.bfloat16().save_pretrained(tmp_path)
    exact = Theirs(type(rounded.model).from_pretrained(tmp_path, dtype=torch.float32))
    completions, scores = served(tmp_path, requests, SWAP, dtype=jnp.bfloat16)
    our_errors, their_errors = [], []
    for request in requests:
        tokens = [*request.prompt, *completions[request.id]]
        new = slice(len(request.prompt) - 1, -1)
        expected = exact.logits(tokens)[new]
        our_errors.append(np.ravel(scores[request.id] - expected))
        their_errors.append(np.ravel(rounded.logits(tokens)[new] - expected))
    ours, others = (np.concatenate(errors).std() for errors in (our_errors, their_errors))
    assert 0 < ours <= 1.5 * others


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
        ("llama", {"model_type": "mamba"}, "model_type"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantized"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "chunked"),
    ],
)
def test_what_is_not_computed_is_refused(tmp_path, saved_as, read_as, message):
    theirs(saved_as).model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | read_as))
    with pytest.raises(ValueError, match=message):
        load_checkpoint(tmp_path)


def test_beams_are_those_of_transformers(tmp_path):
    judge = theirs("llama")
    judge.model.save_pretrained(tmp_path)
    model, params = load_checkpoint(tmp_path)
    model = replace(model, eos_token_id=(3, 5, 8, 13, 21))
    requests = [replace(r, decoding=Beam(3)) for r in shared_prefix_requests()[::2]]
    engine = Engine(params, model, replace(LIMITS, num_blocks=40), "xla")
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
    engine = Engine(params, model, limits, "xla")
    serve(engine, requests)
    expected = {request.id: judge.greedy(request) for request in requests}
    assert greedy_completions(engine) == expected
