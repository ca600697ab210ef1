"""A Llama's parameters as a module of Flax NNX, in the very arrays that the engine reads."""

import jax
from flax import nnx
from jaxtyping import PRNGKeyArray
from pagedattn_serving.families.llama import Llama
from pagedattn_serving.training.initial import init_params

MODEL = Llama(
    vocab_size=24,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=32,
)


class Policy(nnx.Module):
    def __init__(self, model: Llama, key: PRNGKeyArray):
        self.params = nnx.data(jax.tree.map(nnx.Param, init_params(model, key)))

    @property
    def arrays(self) -> dict:
        """The parameters as the engine takes them; nothing is copied."""
        return jax.tree.map(nnx.Param.get_value, self.params, is_leaf=_is_param)


def _is_param(leaf) -> bool:
    return isinstance(leaf, nnx.Param)


def pointers(params: dict) -> list[int]:
    """Where the parameters lie in memory."""
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)]
