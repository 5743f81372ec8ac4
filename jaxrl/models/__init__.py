"""One decoder in Flax Linen for Llama, Mistral, Qwen2 and Qwen3, behind plain functions.

Flax stays inside this folder: parameters outside are nested dicts of arrays.
"""

from __future__ import annotations

from jaxrl.models.config import ModelConfig
from jaxrl.models.model import Cache, Model
from jaxrl.models.rope import RopeConfig
from jaxrl.models.value_head import value_head_apply, value_head_init
from jaxrl.models.weights import Weight, score_bias, score_weight, weight_table

__all__ = [
    "Cache",
    "Model",
    "ModelConfig",
    "RopeConfig",
    "Weight",
    "score_bias",
    "score_weight",
    "value_head_apply",
    "value_head_init",
    "weight_table",
]
