"""A small model and run that plans are made for, and run."""

from __future__ import annotations

from jaxrl.config import Config
from jaxrl.config_io import load_config
from jaxrl.models import ModelConfig

MODEL = ModelConfig(
    "qwen3",
    vocab_size=208,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
"""Untied; no two sizes of a mesh of 4 x 2 are equal."""


def planned_config(*overrides: str) -> Config:
    """Eight rows of 40 tokens in two updates, on fsdp 4 x tensor 2."""
    return load_config(
        [],
        [
            *("model.path=x", "model.dtype=bfloat16", "rollout.prompts=4", "rollout.samples=2"),
            *("data.max_prompt_tokens=10", "rollout.max_new_tokens=30", "algorithm.updates=2"),
            *("packing.row_lengths=[40]", "packing.micro_batch_tokens=160"),
            *("packing.share_prompts=false", "logprob.chunk_size=16"),
            *("data.train.path=x", "reward.functions=[{fn: x:y}]"),
            *("mesh.fsdp=4", "mesh.tensor=2"),
            *overrides,
        ],
    )
