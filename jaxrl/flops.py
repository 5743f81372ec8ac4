"""Model FLOPs of an iteration: the useful products, counted analytically.

Recomputation (rematerialised layers), padding and optimizer arithmetic are not work the model asked
for and are not counted, so the rate compares across settings (Chowdhery et al. 2022, appendix B).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxrl.config import Config
from jaxrl.models import ModelConfig, weight_table
from jaxrl.types import Trajectory

__all__ = ["iteration_flops", "layer_parameters", "longest_flops", "sequence_flops"]

_FORWARD, _TRAIN = 1, 3  # a backward pass costs two forward ones


def layer_parameters(config: ModelConfig) -> int:
    """Parameters in the layers: what multiplies every token, embedding and head left out."""
    return sum(math.prod(w.full_shape) for w in weight_table(config) if w.path[0] == "layers")


def sequence_flops(config: ModelConfig, tokens: int, head_tokens: int) -> float:
    """Forward FLOPs of one sequence: 2 a parameter and token, causal attention, head where used.

    Attention is scores and mixing, 2 * 2 * heads * head_dim for each of the tokens (tokens + 1) / 2
    visible pairs and layer; the head 2 * hidden * vocabulary a token it is evaluated at.
    """
    pairs = tokens * (tokens + 1) / 2
    width = config.num_attention_heads * config.head_dim
    return (
        2.0 * layer_parameters(config) * tokens
        + 4.0 * config.num_hidden_layers * width * pairs
        + 2.0 * config.hidden_size * config.vocab_size * head_tokens
    )


def iteration_flops(
    config: Config, model: ModelConfig, trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """FLOPs of rollout, score and update, for these trajectories.

    The prompt is counted once for all its samples in the rollout, and in score and update too where
    they share it (packing.share_prompts). A critic of its own adds a trunk without head to
    score and update, a reference one forward pass to score.
    """
    found = {"rollout": 0.0, "score": 0.0, "update": 0.0}
    for t in trajectories:
        one = _of_one(config, model, len(t.prompt.ids), len(t.response_ids), sum(t.mask))
        found = {stage: found[stage] + one[stage] for stage in found}
    return found


def longest_flops(
    config: Config, model: ModelConfig, response_tokens: int | None = None
) -> dict[str, float]:
    """The same for an iteration of the longest prompts, each response of that many tokens.

    None: of rollout.max_new_tokens.
    """
    new = config.rollout.max_new_tokens if response_tokens is None else response_tokens
    one = _of_one(config, model, config.data.max_prompt_tokens, new, new)
    return {stage: config.trajectories * flops for stage, flops in one.items()}


def _of_one(
    config: Config, model: ModelConfig, prompt: int, response: int, policy: int
) -> dict[str, float]:
    """FLOPs of one trajectory: tokens of its prompt, its response, and those that are trained."""
    own_trunk = config.needs_critic and config.critic.kind == "model"
    total = prompt + response
    whole = sequence_flops(model, total, policy)
    trunk = sequence_flops(model, total, 0) if own_trunk else 0.0
    spared = sequence_flops(model, prompt, 0) * (1.0 - 1.0 / config.rollout.samples)
    rollout = sequence_flops(model, total, response) - spared
    if config.packing.share_prompts:
        whole, trunk = whole - spared, trunk - spared * own_trunk
    return {
        "rollout": rollout,
        "score": _FORWARD * (whole * (1 + config.needs_reference) + trunk),
        "update": _TRAIN * (whole + trunk) * config.algorithm.epochs,
    }
