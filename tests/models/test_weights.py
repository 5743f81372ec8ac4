"""The weights table: complete, the same tree as the Linen module, exact both ways."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jaxrl.models import Model, ModelConfig, weight_table
from jaxrl.models.block import Settings
from jaxrl.models.decoder import Decoder
from jaxrl.models.layers import Projection
from jaxrl.models.sight import Sight
from jaxrl.models.weights import LOGICAL_AXES

SIZES: dict[str, Any] = dict(
    vocab_size=20,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)
CONFIGS = [
    ModelConfig("llama", **SIZES, attention_bias=True, mlp_bias=True),
    ModelConfig("mistral", **SIZES, windows=(3, 3)),
    ModelConfig("qwen2", **SIZES, tie_word_embeddings=True),
    ModelConfig("qwen3", **SIZES, attention_bias=True),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_table_is_the_tree_of_the_module(config: ModelConfig) -> None:
    params = jax.eval_shape(Model(config).init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}
    assert shapes == {weight.path: weight.full_shape for weight in weight_table(config)}
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    ids = jnp.zeros((1, 3), jnp.int32)
    module = Decoder(Settings(config, jnp.dtype("float32"), None, "dense", False), "none")
    sight = Sight(ids, ids, None, None, ids, ids)
    used: dict[tuple[str, ...], tuple[str, ...]] = {}

    def look(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, Projection):
            used[(*context.module.path, "kernel")] = context.module.axes
        return call(*args, **kwargs)

    with nn.intercept_methods(look):
        linen = jax.eval_shape(module.init, jax.random.key(0), ids, ids, sight)["params"]
    trunk = {name: node for name, node in params.items() if name != "head"}
    assert jax.tree.map(jnp.shape, trunk) == jax.tree.map(lambda leaf: leaf.shape, linen)
    assert ("head" in params) is not config.tie_word_embeddings
    # What the layers say of a kernel where they gather it is what the table says where it is kept.
    kernels = {w.path: w.axes[1:] for w in weight_table(config) if w.path[-1] == "kernel"}
    assert used == {path: axes for path, axes in kernels.items() if path[0] == "layers"}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_entries_are_consistent(config: ModelConfig) -> None:
    table = weight_table(config)
    names = [name for weight in table for name in weight.hf_names()]
    assert len(set(names)) == len(names)
    rng = np.random.default_rng(0)
    for weight in table:
        assert len(weight.axes) == len(weight.full_shape)
        assert set(weight.axes) <= {None, *LOGICAL_AXES}
        assert (weight.axes[0] == "layers") is weight.stacked is ("{layer}" in weight.hf_name)
        tensor = rng.standard_normal(weight.hf_shape)
        ours = weight.from_hf(tensor)
        assert ours.shape == weight.shape
        assert np.array_equal(weight.to_hf(ours), tensor)
        sizes = {
            "vocab": 20,
            "embed": 8,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 6,
            "mlp": 12,
            "layers": 2,
        }
        for axis, size in zip(weight.axes, weight.full_shape, strict=True):
            assert axis is None or sizes[axis] == size


def test_layout_by_hand() -> None:
    """Row h * head_dim + d of a q_proj is head h, dimension d; so are the columns of o_proj."""
    table = {weight.path: weight for weight in weight_table(CONFIGS[0])}
    q = np.arange(24 * 8).reshape(24, 8)
    ours = table["layers", "attention", "q", "kernel"].from_hf(q)
    assert ours[5, 2, 3] == q[2 * 6 + 3, 5]
    o = np.arange(8 * 24).reshape(8, 24)
    assert table["layers", "attention", "o", "kernel"].from_hf(o)[2, 3, 5] == o[5, 2 * 6 + 3]
    bias = np.arange(12)
    assert table["layers", "attention", "k", "bias"].from_hf(bias)[1, 4] == 10
    gate = np.arange(12 * 8).reshape(12, 8)
    assert table["layers", "mlp", "gate", "kernel"].from_hf(gate)[5, 7] == gate[7, 5]
    head = np.arange(20 * 8).reshape(20, 8)
    assert table["head", "kernel"].from_hf(head)[3, 11] == head[11, 3]


def test_head_dim_is_its_own() -> None:
    """MM-01: the shape of Qwen3-0.6B, where heads * head_dim is twice hidden_size."""
    config = ModelConfig.from_hf(
        dict(
            model_type="qwen3",
            vocab_size=32,
            hidden_size=1024,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
        )
    )
    shapes = {weight.hf_name.split(".")[-2]: weight.hf_shape for weight in weight_table(config)}
    assert shapes["q_proj"] == (2048, 1024)
    assert shapes["k_proj"] == shapes["v_proj"] == (1024, 1024)
    assert shapes["o_proj"] == (1024, 2048)
    assert shapes["q_norm"] == shapes["k_norm"] == (128,)
