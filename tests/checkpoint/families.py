"""Tiny random Hugging Face models of each family, and logits by transformers and by us."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from jaxrl.checkpoint.hf import load_hf_config
from jaxrl.models import Model, ModelConfig

Folder = Callable[[str], Path]
TOKENS = np.array([[5, 9, 60, 3, 3, 17, 44, 2], [1, 0, 7, 58, 30, 12, 11, 10]])

_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# Each differs from the sizes above where its family allows it.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True},
    "llama-untied": {
        "model_type": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral-untied": {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 4},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3-untied": {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 16},
    "qwen3-tied": {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 16},
}


def make_model(family: str) -> Any:
    """Returns a random model whose every parameter, norms and biases included, is its own."""
    settings = {**_SIZES, **FAMILIES[family]}
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(sum(map(ord, family)))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig.from_hf(load_hf_config(folder))


def our_logits(params: dict[str, Any], config: ModelConfig, tokens: np.ndarray) -> np.ndarray:
    model = Model(config, dtype="float32", remat="none")
    tokens = tokens.astype(np.int32)
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    hidden = model.hidden(params, tokens, positions, np.ones_like(tokens))
    return np.asarray(hidden @ model.head(params))


def torch_logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.numpy()


def assert_same_tree(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, dict):
            assert_same_tree(value, other[name])
        else:
            assert value.dtype == other[name].dtype
            np.testing.assert_array_equal(value, other[name])
