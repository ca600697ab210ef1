"""The benchmark of several devices: its model of random weights compiles in seconds."""

from dataclasses import replace

import jax
import numpy as np
from benchmarks import devices
from benchmarks.models import SHAPES, spread_params
from benchmarks.random_arrays import random_array
from jax.sharding import Mesh
from pagedattn_serving.parallel.tensor import AXIS


def test_more_layers_need_no_more_programs():
    """A program a layer took minutes to compile for the 32 layers of a real model."""
    mesh = Mesh(np.array(jax.devices()[:1]), AXIS)

    def programs(layers):
        model = replace(SHAPES["llama-8b"], **devices.SMALL | {"num_hidden_layers": layers})
        params = spread_params(mesh, model)
        state = devices.state_after(mesh, model, params, 2, 20, max_new_tokens=4)
        assert len(params["layers"]) == len(state.caches) == layers
        assert state.pool.seq_lens.tolist() == [19, 19]
        return random_array._cache_size()

    assert programs(1) == programs(3)
