"""Logits equal those of transformers, for a random tiny model of each family."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from torch_reference import SIZES, params_of, torch_model
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from jaxrl.models import Model, ModelConfig
from jaxrl.models.rope import attention_factor, inverse_frequencies

LENGTH = 20

LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=1e4,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, beta_fast=2.0
)
LINEAR = dict(rope_type="linear", rope_theta=1e4, factor=2.5)
SLIDING, FULL = "sliding_attention", "full_attention"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("llama", dict(num_key_value_heads=4)),
    "llama3-scaled": ("llama", dict(rope_parameters=LLAMA3, head_dim=16)),
    "llama-biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "smollm2-tied": ("llama", dict(tie_word_embeddings=True)),
    "llama-linear": ("llama", dict(rope_parameters=LINEAR)),
    "mistral-window": ("mistral", dict(sliding_window=5)),
    "mistral-no-window": ("mistral", dict(sliding_window=None, head_dim=6)),
    "qwen2": ("qwen2", dict(tie_word_embeddings=True)),
    "qwen2-window": (
        "qwen2",
        dict(use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": ("qwen3", dict(head_dim=12)),
    "qwen3-biases-tied": (
        "qwen3",
        dict(head_dim=16, attention_bias=True, tie_word_embeddings=True, num_key_value_heads=1),
    ),
    "qwen3-layer-types": (
        "qwen3",
        dict(
            head_dim=8,
            use_sliding_window=True,
            sliding_window=4,
            layer_types=[SLIDING, FULL, SLIDING],
        ),
    ),
    "qwen3-yarn": ("qwen3", dict(head_dim=16, rope_parameters=YARN)),
}


def logits_of(model: Model, params: Any, tokens: np.ndarray) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    segments = jnp.ones(tokens.shape, jnp.int32)
    hidden = jax.jit(model.hidden)(params, jnp.asarray(tokens), positions, segments)
    return np.asarray(hidden @ model.head(params), np.float32)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str) -> None:
    family, settings = CASES[case]
    reference = torch_model(family, **settings)
    config = ModelConfig.from_hf(reference.config.to_dict())
    params = params_of(reference, config)
    tokens = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (2, LENGTH)).astype(np.int32)
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens).long()).logits.numpy()
    assert expected.std() > 0.5  # a model that says something
    np.testing.assert_allclose(
        logits_of(Model(config), params, tokens), expected, atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("case", CASES)
def test_config_round_trip_through_transformers(case: str) -> None:
    """config.json → ours → transformers: every field of the original comes back."""
    family, settings = CASES[case]
    original = transformers.CONFIG_MAPPING[family](**{**SIZES, **settings})
    ours = ModelConfig.from_hf(original.to_dict())
    written = ours.to_hf()
    again = transformers.AutoConfig.for_model(**written)
    assert ModelConfig.from_hf(again.to_dict()) == ours
    assert ModelConfig.from_hf(written) == ours
    expected, got = original.to_dict(), again.to_dict()
    # Not read when no layer slides; what the file says of the architecture is new.
    unread = {"architectures"} | (set() if ours.windows else {"max_window_layers"})
    assert expected["model_type"] == family
    for name in expected.keys() - unread:
        if name == "max_window_layers" and settings.get("layer_types"):
            continue  # layer_types goes before it
        assert got[name] == expected[name], name


@pytest.mark.parametrize(
    "settings",
    [
        LINEAR,
        LLAMA3,
        YARN,
        YARN | dict(truncate=False),
        YARN | dict(attention_factor=0.7),
        YARN | dict(mscale=0.8, mscale_all_dim=0.5),
        YARN | dict(mscale=0.8),
        YARN | dict(factor=0.5),
        YARN | dict(beta_fast=32.0, beta_slow=32.0),
        YARN | dict(rope_theta=1e6, original_max_position_embeddings=32768, beta_fast=32.0),
    ],
)
def test_rope_equals_transformers(settings: dict[str, Any]) -> None:
    config = transformers.LlamaConfig(
        **{**SIZES, "head_dim": 64, "max_position_embeddings": 4096}, rope_parameters=dict(settings)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[settings["rope_type"]](config, "cpu")
    rope = ModelConfig.from_hf(config.to_dict()).rope
    np.testing.assert_allclose(inverse_frequencies(rope, 64), expected.numpy(), rtol=1e-6)
    assert attention_factor(rope) == pytest.approx(factor, rel=1e-12)
