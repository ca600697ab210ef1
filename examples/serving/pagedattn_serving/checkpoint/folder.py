"""Checkpoints as Hugging Face lays them out: `config.json` beside safetensors, whole or sharded."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from safetensors.flax import save_file

from pagedattn import InvalidInputError
from pagedattn_serving.checkpoint.quantised import dequantised
from pagedattn_serving.checkpoint.tensor_file import read_tensors
from pagedattn_serving.families import model_of
from pagedattn_serving.families.decoder import Decoder, Name

WIDE = "e_score_correction_bias"  # decides between experts by differences that rounding would hide
Names = Mapping[str, Name]
SHIPPED = Path(__file__).parents[1] / "models" / "pydoc-llama"  # made by training/train.py
CONFIG, GENERATION = "config.json", "generation_config.json"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Tensors that may be left unused: the angles are computed anew, a tied head is the embedding.
UNREAD = ("rotary_emb.inv_freq", "lm_head.weight")


def load_checkpoint(directory: Path, dtype=jnp.float32) -> tuple[Decoder, dict]:
    """The model in `directory`, and its parameters, as `dtype` whatever the files store.

    Weights that are quantised there are not any more in the parameters.

    Raises:
      InvalidInputError: The config asks for something that no family computes; a file or a tensor
        of the model is missing, or one of the files would not be used; scales of quantised weights
        are missing or wrong.
    """
    raw = _raw_config(directory / CONFIG)
    model, tensors = model_of(raw), {}
    for path in tensor_files(directory):
        _require_file(path)
        tensors |= read_tensors(path)
    whole = dequantised(tensors, raw.get("quantization_config") or {})
    return model, params_of(model, {name: rounded(name, t, dtype) for name, t in whole})


def save_checkpoint(directory: Path, model: Decoder, params: dict, dtype=jnp.bfloat16) -> None:
    """Writes `config.json` and `model.safetensors`, with the parameters rounded to `dtype`."""
    directory.mkdir(parents=True, exist_ok=True)
    names = {
        "architectures": [model.architecture],
        "model_type": model.model_type,
        "torch_dtype": jnp.dtype(dtype).name,
    }
    (directory / CONFIG).write_text(json.dumps(names | asdict(model), indent=2) + "\n")
    tensors = {name: rounded(name, t, dtype) for name, t in tensors_of(model, params).items()}
    save_file(tensors, directory / WHOLE, metadata={"format": "pt"})


def rounded(name: str, tensor: Array | np.ndarray, dtype) -> Array:
    return jnp.asarray(tensor, jnp.float32 if name.endswith(WIDE) else dtype)


def read_config(path: Path) -> Decoder:
    return model_of(_raw_config(path))


def tensor_files(directory: Path) -> Iterable[Path]:
    """The files with the tensors: a single one, or the shards that the index names."""
    index = directory / INDEX
    if not index.exists():
        return [directory / WHOLE]
    shards = set(json.loads(index.read_text())["weight_map"].values())
    if outside := [shard for shard in shards if Path(shard).name != shard]:
        raise InvalidInputError(f"shards must lie beside their index, got {outside}")
    return [directory / shard for shard in sorted(shards)]


def names_of(model: Decoder) -> tuple[Names, list[Names]]:
    """The checkpoint's names of tensors by ours: outside the layers, and for each layer."""
    prefixes = (model.layer_prefix.format(index) for index in range(model.num_hidden_layers))
    layers: list[Names] = [
        {ours: _prefixed(prefix, theirs) for ours, theirs in model.layer_names(index).items()}
        for index, prefix in enumerate(prefixes)
    ]
    return model.outer_names(), layers


def params_of(model: Decoder, tensors: dict) -> dict:
    """The tree of parameters that the families read, from tensors by Hugging Face's flat names."""
    prefixes = (model.base_prefix, "lm_head.")  # checkpoints saved without a head lack the prefix
    tensors = {
        name if name.startswith(prefixes) else model.base_prefix + name: tensor
        for name, tensor in tensors.items()
    }
    outer, layers = names_of(model)
    tensors = {name: t for name, t in tensors.items() if not name.startswith(model.other_layers)}
    _require_exactly(tensors, {name for names in (outer, *layers) for name in _flat(names)})
    params = _tree(tensors, outer) | {"layers": [_tree(tensors, names) for names in layers]}
    _require_vocabulary(model, params)
    return params


def tensors_of(model: Decoder, params: dict) -> dict:
    """Tensors by Hugging Face's flat names, from the tree; the inverse of `params_of`."""
    outer, layers = names_of(model)
    tensors = {}
    for names, tree in zip((outer, *layers), (params, *params["layers"]), strict=True):
        for ours, theirs in names.items():
            whole = isinstance(theirs, str)
            tensors |= {theirs: tree[ours]} if whole else dict(zip(theirs, tree[ours], strict=True))
    return tensors


def _tree(tensors: dict, names: Names) -> dict:
    """Tensors by our names; those of several names are stacked along a new first axis."""
    return {
        ours: tensors[theirs]
        if isinstance(theirs, str)
        else jnp.stack([tensors[each] for each in theirs])
        for ours, theirs in names.items()
    }


def _prefixed(prefix: str, name: Name) -> Name:
    return prefix + name if isinstance(name, str) else tuple(prefix + each for each in name)


def _flat(names: Names) -> Iterable[str]:
    for name in names.values():
        yield from (name,) if isinstance(name, str) else name


def _raw_config(path: Path) -> dict:
    """A config, with the tokens that end a text as the file beside it for generation says.

    Of chat models only that one may name the end of a turn.
    """
    raw, beside = _read_json(path), path.with_name(GENERATION)
    ends = _read_json(beside).get("eos_token_id") if beside.is_file() else None
    return raw if ends is None else raw | {"eos_token_id": ends}


def _read_json(path: Path) -> dict:
    _require_file(path)
    return json.loads(path.read_text())


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise InvalidInputError(
            f"expected a checkpoint's folder, with {CONFIG} and {WHOLE} in it, but there is no "
            f"{path}: `hf download NAME --local-dir {path.parent}` brings one"
        )


def _require_vocabulary(model: Decoder, params: dict) -> None:
    """A row for each token: of one beyond the end, JAX would read the last row."""
    for name in ("embedding", "lm_head"):
        if name in params and len(params[name]) != model.vocab_size:
            raise InvalidInputError(
                f"expected vocab_size={model.vocab_size} rows in {model.outer_names()[name]}, got "
                f"{len(params[name])}: {CONFIG} is not this checkpoint's"
            )


def _require_exactly(tensors: dict, expected: set[str]) -> None:
    if missing := sorted(expected - tensors.keys()):
        raise InvalidInputError(
            f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:5])}"
        )
    unused = sorted(name for name in tensors.keys() - expected if not name.endswith(UNREAD))
    if unused:
        raise InvalidInputError(f"{len(unused)} tensors would not be used: {', '.join(unused[:5])}")
