"""Llama checkpoints as Hugging Face lays them out: `config.json` beside `model*.safetensors`."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import jax.numpy as jnp
from llama import LlamaConfig
from safetensors.flax import load_file, save_file

LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
REQUIRED = {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)}


def load_checkpoint(directory: Path) -> tuple[LlamaConfig, dict]:
    """The model in `directory`; float32 parameters, whatever the file stores.

    Raises ValueError when the config asks for what `llama.py` does not compute, or when the file's
    tensors are not the model's.
    """
    config = read_config(directory / "config.json")
    tensors = {}
    for path in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(path)
    return config, params_of(config, tensors)


def save_checkpoint(directory: Path, config: LlamaConfig, params: dict, dtype=jnp.bfloat16) -> None:
    """Writes `config.json` and `model.safetensors`, with the parameters rounded to `dtype`."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": jnp.dtype(dtype).name,
    }
    (directory / "config.json").write_text(json.dumps(names | asdict(config), indent=2) + "\n")
    tensors = {name: tensor.astype(dtype) for name, tensor in tensors_of(params).items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def read_config(path: Path) -> LlamaConfig:
    """Parses a `config.json`, with its RoPE fields in the older or the newer place."""
    raw = json.loads(path.read_text())
    raw |= raw.pop("rope_parameters", None) or {}
    reject_unsupported(raw)
    raw["head_dim"] = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    raw.setdefault("num_key_value_heads", raw["num_attention_heads"])
    if isinstance(raw.get("eos_token_id"), list):
        raw["eos_token_id"] = tuple(raw["eos_token_id"])
    known = {field.name for field in fields(LlamaConfig)}
    return LlamaConfig(**{name: value for name, value in raw.items() if name in known})


def reject_unsupported(raw: dict) -> None:
    """Raises ValueError for a model that would load but compute something else."""
    if raw["model_type"] not in ("llama", "mistral"):
        raise ValueError(f"expected model_type llama or mistral, got {raw['model_type']!r}")
    if raw.get("rope_scaling") or raw.get("rope_type", "default") != "default":
        raise ValueError("scaled RoPE is not implemented: extend rope() in llama.py")
    for name, accepted in REQUIRED.items():
        if raw.get(name, accepted[0]) not in accepted:
            raise ValueError(f"expected {name} in {accepted}, got {raw[name]!r}")


def layer_prefix(index: int) -> str:
    return f"model.layers.{index}."


def params_of(config: LlamaConfig, tensors: dict) -> dict:
    """Hugging Face's flat names to the tree that `llama.py` reads."""
    tensors = {name: jnp.asarray(tensor, jnp.float32) for name, tensor in tensors.items()}
    params = {
        "embedding": tensors["model.embed_tokens.weight"],
        "layers": [
            {
                name: tensors[f"{layer_prefix(index)}{theirs}.weight"]
                for name, theirs in LAYER_NAMES.items()
            }
            for index in range(config.num_hidden_layers)
        ],
        "norm": tensors["model.norm.weight"],
    }
    return params if config.tie_word_embeddings else params | {"lm_head": tensors["lm_head.weight"]}


def tensors_of(params: dict) -> dict:
    """The tree to Hugging Face's flat names; the inverse of `params_of`."""
    tensors = {
        f"{layer_prefix(index)}{theirs}.weight": layer[name]
        for index, layer in enumerate(params["layers"])
        for name, theirs in LAYER_NAMES.items()
    }
    tensors["model.embed_tokens.weight"] = params["embedding"]
    tensors["model.norm.weight"] = params["norm"]
    return tensors | ({"lm_head.weight": params["lm_head"]} if "lm_head" in params else {})
