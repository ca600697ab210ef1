"""Trains a byte-level Llama on the text of `pydoc_data.topics`, Python's own language reference.

    python -m pagedattn_serving.training.train --out pydoc-llama  # with the extra "training"

Two minutes on an H200; on a CPU take fewer steps and a smaller batch. The numbers of the run are
written to the README.md beside the checkpoint.
"""

import argparse
import platform
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from pagedattn_serving.checkpoint.folder import load_checkpoint, save_checkpoint
from pagedattn_serving.families.forward import forward_dense
from pagedattn_serving.families.llama import Llama
from pagedattn_serving.training.corpus import (
    END_OF_TOPIC,
    Bytes,
    Text,
    add_noise,
    split_topics,
    windows_at,
)
from pagedattn_serving.training.initial import init_params

MODEL = Llama(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=576,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    eos_token_id=END_OF_TOPIC,
)
LENGTH = MODEL.max_position_embeddings


def loss_of(params: dict, inputs: Bytes, targets: Bytes) -> Float[Array, ""]:
    """Mean cross entropy of each next byte, in nats."""
    hidden = jax.vmap(lambda tokens: forward_dense(params, MODEL, tokens))(inputs)
    logits = MODEL.logits(params, hidden)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets.astype(jnp.int32))
    return losses.mean()


def make_optimizer(steps: int, peak: float, weight_decay: float) -> optax.GradientTransformation:
    """AdamW with warm-up and a cosine schedule; norms get no weight decay."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, max(steps // 20, 1), steps, peak / 20)
    matrices = partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=weight_decay, mask=matrices)
    return optax.chain(optax.clip_by_global_norm(1.0), adamw)


@partial(jax.jit, static_argnames=("optimizer", "batch"), donate_argnames=("params", "state"))
def train_step(params: dict, state, text: Text, key: PRNGKeyArray, optimizer, batch: int, noise):
    starts_key, noise_key = jax.random.split(key)
    starts = jax.random.randint(starts_key, (batch,), 0, len(text) - LENGTH)
    inputs, targets = windows_at(text, starts, LENGTH)
    inputs = add_noise(inputs, noise_key, noise)
    loss, gradients = jax.value_and_grad(loss_of)(params, inputs, targets)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss


@partial(jax.jit, static_argnames="batch")
def evaluate(params: dict, text: Text, batch: int) -> Float[Array, ""]:
    """Loss, without noise, on windows spread evenly over the text."""
    starts = jnp.linspace(0, len(text) - LENGTH - 1, batch).astype(jnp.int32)
    return loss_of(params, *windows_at(text, starts, LENGTH))


def train(args: argparse.Namespace, training: Text, validation: Text) -> dict:
    """The trained parameters; reports the noisy training loss and the clean validation loss."""
    init_key, data_key = jax.random.split(jax.random.key(args.seed))
    params = init_params(MODEL, init_key)
    optimizer = make_optimizer(args.steps, args.learning_rate, args.weight_decay)
    state, start = optimizer.init(params), time.monotonic()
    for step in range(args.steps):
        key = jax.random.fold_in(data_key, step)
        params, state, loss = train_step(
            params, state, training, key, optimizer, args.batch, args.noise
        )
        if step % args.log_every == 0 or step == args.steps - 1:
            held_out = evaluate(params, validation, args.batch)
            seconds = time.monotonic() - start
            print(f"{step=} {loss=:.4f} validation={held_out:.4f} {seconds=:.1f}", flush=True)
    return params


README = """\
# pydoc-llama

A byte-level model of {parameters:,} parameters ({size:.1f} MB in bfloat16), in Hugging Face's Llama
format. It knows the text of `pydoc_data.topics` in Python {python}, largely by heart, and nothing
else: it is here to give the demo something readable to serve. Byte {end} ends a topic.

Made by

    python -m pagedattn_serving.training.train --steps {steps} --batch {batch} \\
        --learning-rate {learning_rate} \\
        --weight-decay {weight_decay} --noise {noise} --seed {seed} --out DIR

in {seconds:.0f} s on {device} with JAX {jax}. Loss after rounding to bfloat16, in nats a byte:
{training:.2f} on the text that it was trained on, {validation:.1f} on paragraphs held out from it.

The text is part of Python's documentation, Copyright Python Software Foundation, used under the
PSF License Agreement: https://docs.python.org/3/license.html
"""


def describe(args: argparse.Namespace, seconds: float, training: Text, validation: Text) -> str:
    """The README of the checkpoint in `args.out`; losses are of the rounded weights in the file."""
    _, params = load_checkpoint(args.out)
    return README.format(
        parameters=sum(leaf.size for leaf in jax.tree.leaves(params)),
        size=(args.out / "model.safetensors").stat().st_size / 1e6,
        python=platform.python_version(),
        jax=jax.__version__,
        device=jax.devices()[0].device_kind,
        end=END_OF_TOPIC,
        seconds=seconds,
        training=float(evaluate(params, training, args.batch)),
        validation=float(evaluate(params, validation, args.batch)),
        **{name: value for name, value in vars(args).items() if name != "out"},
    )


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=64, help="sequences of 512 bytes a step")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--noise", type=float, default=0.05, help="share of input bytes replaced")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-every", type=int, default=100, help="steps between two reports")
    return parser.parse_args()


def main() -> None:
    args, start = parse_args(), time.monotonic()
    training, validation = split_topics()
    params = train(args, training, validation)
    save_checkpoint(args.out, MODEL, params)
    readme = describe(args, time.monotonic() - start, training, validation)
    (args.out / "README.md").write_text(readme)
    print(readme)


if __name__ == "__main__":
    main()
