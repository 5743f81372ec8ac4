"""Tiny random transformers models, and their tensors in our layout through the weights table."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from jaxrl.models import ModelConfig, weight_table

torch.set_num_threads(1)

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
)


def torch_model(family: str, **settings: Any) -> transformers.PreTrainedModel:
    """A model with weights large enough that a wrong layer changes every logit."""
    config_class = transformers.CONFIG_MAPPING[family]
    config = config_class(**{**SIZES, **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else 0.25 * noise)
    return model.eval()


def params_of(model: transformers.PreTrainedModel, config: ModelConfig) -> dict[str, Any]:
    """Our nested dict of the torch model's tensors; every tensor must be asked for exactly once."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    params: dict[str, Any] = {}
    for weight in weight_table(config):
        tensors = [state.pop(name) for name in weight.hf_names()]
        assert all(tensor.shape == weight.hf_shape for tensor in tensors)
        arrays = [weight.from_hf(tensor) for tensor in tensors]
        node = params
        for name in weight.path[:-1]:
            node = node.setdefault(name, {})
        node[weight.path[-1]] = np.stack(arrays) if weight.stacked else arrays[0]
    assert not state, f"tensors that the table does not name: {sorted(state)}"
    return params
