"""Attention without pages, of torch and of JAX: one call for each sequence, its keys gathered."""

import numpy as np

from benchmarks.scoreboard.peer import Answer, Peer, Sequence, scale_of, sequences, tensor
from pagedattn.testing import Problem


def torch_sdpa(problem: Problem) -> Answer:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    def attend(part: Sequence):
        query, key, value = (tensor(x).transpose(0, 1)[None] for x in part[:3])
        mask = torch.from_numpy(part.visible)[None]
        if part.bias is not None:
            bias = tensor(part.bias).transpose(0, 1)
            mask = torch.where(mask, bias, -torch.inf)
        options = {"scale": scale_of(problem), "enable_gqa": True}
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask[None], **options)
        return out[0].transpose(0, 1).float()

    return torch.cat([attend(part) for part in sequences(problem)]).numpy(), None


def jax_nn(problem: Problem) -> Answer:
    import jax
    import jax.numpy as jnp

    def attend(part: Sequence):
        query_len, seq_len = part.visible.shape
        window, causal = problem.spec.sliding_window, problem.spec.causal
        options = {"scale": scale_of(problem), "return_residual": True}
        if query_len == seq_len:  # else its causality counts from the first key, not to the last
            options |= {"is_causal": causal}
            if window is not None:
                options["local_window_size"] = (window - 1, 0 if causal else window - 1)
        else:
            options["mask"] = part.visible[None]
        if part.bias is not None:
            options["bias"] = jnp.asarray(part.bias.swapaxes(0, 1))
        out, lse = jax.nn.dot_product_attention(*map(jnp.asarray, part[:3]), **options)
        return out.astype(jnp.float32), lse

    results = [attend(part) for part in sequences(problem) if len(part.query)]
    out, lse = (np.concatenate(parts) for parts in zip(*results, strict=True))
    return out, lse


def _lacks(cell) -> str | None:
    return "it has no pages" if cell.row == "NaN in unused slots" else None


DENSE = {
    "torch SDPA": Peer(
        torch_sdpa,
        frozenset(
            {"scale", "sliding_window", "bias", "value_dim", "latent", "causal=False"}
            | {"float16", "float32"}
        ),
        modules=("torch",),
        install="pip install torch",
        packages=("torch",),
        device="cpu",
        about="`torch.nn.functional.scaled_dot_product_attention` with `enable_gqa`, on a CPU; "
        "causality, windows and biases are its `attn_mask`, which is of the query's dtype",
        lacks=_lacks,
    ),
    "jax.nn": Peer(
        jax_nn,
        frozenset({"scale", "sliding_window", "bias", "lse", "causal=False", "float16", "float32"}),
        modules=("jax",),
        install="pip install jax",
        packages=("jax", "jaxlib"),
        device="cpu",
        about="`jax.nn.dot_product_attention`, on a CPU; where a sequence has a context, causality "
        "and windows are its `mask`; it gives an lse of the query's dtype",
        lacks=_lacks,
    ),
}
