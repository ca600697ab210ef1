"""Models on two GPUs that add up by parallel/all_reduce.py: the weights for it, and Llama's norms.

Every family adds up so where it multiplies by a weight that is spread along its inputs. Of Llama
the same kernel adds the residual and computes the norm that comes next: its layers hand on both.
"""

from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array

from pagedattn_serving.families.decoder import Decoder, Heads, Hidden, Tokens
from pagedattn_serving.families.llama import Llama
from pagedattn_serving.families.pieces import GATE_UP, linears
from pagedattn_serving.parallel.all_reduce import MOST_ROWS, Summed, peers

# Weights of which a device has the inputs that it makes itself: sums over devices are the outputs.
BY_INPUT = ("output", "down")


@dataclass(frozen=True)
class Normed:
    """The sum that a layer hands on, and its norm. Rows of it are rows of the norm."""

    hidden: Hidden
    norm: Hidden

    def __getitem__(self, rows: Array) -> Hidden:
        return self.norm[rows]


@dataclass(frozen=True, kw_only=True)
class PeerLlama(Llama):
    """A Llama with layers of `handing_on_norms`."""

    def embed(self, params: dict, tokens: Tokens) -> Any:
        hidden = super().embed(params, tokens)
        return Normed(hidden, self.norm(params, "first_norm", hidden))

    def heads(
        self, index: int, layer: dict, hidden: Any, positions: Tokens
    ) -> tuple[Heads, Heads, Heads]:
        return super().heads(index, layer, hidden.norm, positions)

    def rest(self, layer: dict, hidden: Any, attended: Hidden) -> Any:
        hidden = self.added(layer, "output", attended, hidden.hidden)
        gate, up = linears(layer, GATE_UP, hidden.norm, (1, 1))
        return self.added(layer, "down", jax.nn.silu(gate) * up, hidden.hidden)

    def added(self, layer: dict, name: str, x: Hidden, residual: Hidden) -> Normed:
        summed, scale = layer[name], layer[f"{name}_norm"]
        if len(x) <= MOST_ROWS:
            both = summed.peers.sum_and_norm(x, summed.weight, residual, scale, self.rms_norm_eps)
            return Normed(*both)
        hidden = residual + x @ summed.T
        return Normed(hidden, self.normed(hidden, scale))


def by_peers(mesh: Mesh, model: Decoder, params: dict) -> tuple[Decoder, dict]:
    """The same model and parameters, which add up by a kernel where the devices of a mesh can."""
    # One for each weight: where attention and MLP are side by side, XLA may run both sums at once.
    adding = {name: add for name in BY_INPUT if (add := peers(mesh, model.hidden_size))}
    if not adding:
        return model, params

    def summed(name: str, weight: Array) -> Any:
        spread = name in adding and weight.ndim == 2 and not weight.is_fully_replicated
        return Summed(weight, adding[name]) if spread else weight

    layers = [{name: summed(name, x) for name, x in layer.items()} for layer in params["layers"]]
    params = params | {"layers": layers}
    plain = type(model) is Llama and not model.attention_bias
    if plain and all(isinstance(layer[name], Summed) for layer in layers for name in BY_INPUT):
        return PeerLlama(**vars(model)), handing_on_norms(params)
    return model, params


def handing_on_norms(params: dict) -> dict:
    """Llama's parameters with each norm called after the weight whose sum it takes."""
    layers = params["layers"]
    own = {"attention_norm", "mlp_norm"}
    after = [*(layer["attention_norm"] for layer in layers[1:]), params["norm"]]
    renamed = [
        {name: x for name, x in layer.items() if name not in own}
        | {"output_norm": layer["mlp_norm"], "down_norm": norm}
        for layer, norm in zip(layers, after, strict=True)
    ]
    outer = {name: x for name, x in params.items() if name != "norm"}
    return outer | {"layers": renamed, "first_norm": layers[0]["attention_norm"]}
