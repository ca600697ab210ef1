"""The text that the shipped model was trained on: `pydoc_data.topics`, as bytes."""

from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8

END_OF_TOPIC = 0  # a byte that the text does not contain
HELD_OUT_EVERY = 20

Text = UInt8[Array, " num_bytes"]
Bytes = UInt8[Array, "batch length"]


def split_topics() -> tuple[Text, Text]:
    """Training and validation text, without common paragraphs (topics quote each other)."""
    texts = [topics[name].strip() for name in sorted(topics)]
    held_out = texts[::HELD_OUT_EVERY]
    training = [text for text in texts if text not in held_out]
    seen = {paragraph for text in training for paragraph in text.split("\n\n")}
    unseen = ["\n\n".join(p for p in text.split("\n\n") if p not in seen) for text in held_out]
    return as_bytes(training), as_bytes(unseen)


def as_bytes(texts: list[str]) -> Text:
    joined = "".join(text + chr(END_OF_TOPIC) for text in texts)
    return jnp.frombuffer(joined.encode(), jnp.uint8)


def windows_at(text: Text, starts: Int[Array, " batch"], length: int) -> tuple[Bytes, Bytes]:
    """Inputs of `length` bytes from each start on, and their targets: the same, one byte later."""
    indices = starts[:, None] + jnp.arange(length)
    return text[indices], text[indices + 1]


def add_noise(inputs: Bytes, key: PRNGKeyArray, rate: Float[Array, ""] | float) -> Bytes:
    """Replaces bytes at random, lest a few bytes suffice the model to recite its small text."""
    where_key, what_key = jax.random.split(key)
    noise = jax.random.randint(what_key, inputs.shape, 0, 256, jnp.uint8)
    return jnp.where(jax.random.bernoulli(where_key, rate, inputs.shape), noise, inputs)
