"""Engines' layers in torch.compile: it calls them as they are, and compiles what is around them."""

import pytest
import torch

import pagedattn_torch as pt

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
SIZES = {"num_heads": 4, "head_size": 16, "num_kv_heads": 2}


def make_step():
    """A fused projection, attention that writes its cache, and a copy of blocks."""
    layer = pt.TorchSDPABackendImpl(**SIZES)
    metadata = pt.TorchSDPAMetadata.from_lists([5, 1], [0, 8], [[3, 0], [5, 2, 6]], block_size=4)
    weight = torch.randn(128, 32, generator=torch.Generator().manual_seed(0))

    def step(x, kv_cache):
        query, key, value = (x @ weight.T).split([64, 32, 32], -1)
        out = layer.forward(query, key, value, kv_cache, metadata) * 2
        pt.TorchSDPABackend.copy_blocks([kv_cache], {0: [1]})
        pt.TorchSDPABackend.swap_blocks(kv_cache, kv_cache, {3: 4})
        return out

    return step


@pytest.mark.parametrize("mode", MODES)
def test_compiled_steps_are_right(mode):
    step = make_step()
    with MODES[mode]():
        x, caches = torch.linspace(-1, 1, 192).view(6, 32), torch.zeros(2, 2, 8, 4, 2, 16)
        expected = step(x, caches[0])
        torch._dynamo.reset()
        found = torch.compile(step, backend="eager")(x, caches[1])
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(caches[1], caches[0])
