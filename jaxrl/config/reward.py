"""How completions are scored."""

# OmegaConf reads these annotations at run time: no `from __future__ import annotations` here.
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["RewardConfig", "RewardFunctionConfig", "RewardModelConfig", "RewardServerConfig"]


@dataclass(frozen=True)
class RewardFunctionConfig:
    """One reward function (an entry of `reward.functions`)."""

    fn: str = ""
    """`module:function`, called as fn(prompts=, completions=, completion_ids=, **columns);
    returns for each completion one float, or a list with one for each of its token ids."""
    weight: float = 1.0
    """Factor in the weighted sum."""


@dataclass(frozen=True)
class RewardModelConfig:
    """One reward model (an entry of `reward.models`): scores on the trainer's devices."""

    path: str = ""
    """Folder of a Hugging Face sequence classifier with one label, of a family the policy may have:
    config.json, safetensors, tokenizer. Its score is read at the last token."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    chat: bool = True
    """Whether it reads the messages and the completion through its own chat template, or the
    prompt's text and the completion one after the other."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; the score itself is float32."""
    max_tokens: int = 4096
    """Longest text; of a longer one the last tokens are read."""
    batch_tokens: int = 8192
    """Tokens computed at once, padding included."""


@dataclass(frozen=True)
class RewardServerConfig:
    """One remote reward (an entry of `reward.servers`): asked over HTTP."""

    url: str = ""
    """Where to POST {prompts, completions, completion_ids, columns}; answers {"rewards": [...]}, as
    a function would. Proxies are not used."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    batch_size: int = 64
    """Completions a request."""
    concurrency: int = 8
    """Requests in flight."""
    attempts: int = 4
    """How often a request is sent while there is no answer, or 408, 425, 429 or 5xx."""
    timeout_s: float = 60.0
    """Seconds an attempt may take."""


@dataclass(frozen=True)
class RewardConfig:
    """How completions are scored (section `reward`)."""

    functions: list[RewardFunctionConfig] = field(default_factory=list)
    """Python functions, called in a worker process. The score is the weighted sum of functions,
    models and servers; at least one of these, unless `rollout.env` gives rewards."""
    models: list[RewardModelConfig] = field(default_factory=list)
    """Reward models, computed on the trainer's devices."""
    servers: list[RewardServerConfig] = field(default_factory=list)
    """Remote rewards, for what needs another machine or library."""
    timeout_s: float = 60.0
    """Seconds a call in the worker process may take."""
    on_invalid: Literal["error", "drop"] = "error"
    """None, NaN or inf for a completion stops the run, or takes it out of the update, counted."""
    normalise: Literal["off", "std", "mean_std"] = "off"
    """Divide scores by the deviation of all scores so far, after taking off their mean or not.
    GAE needs no normalised rewards if its advantages are whitened; a reward model's scale, or one
    that drifts, is another matter (https://arxiv.org/abs/2005.12729 on running deviations)."""
    scale: float = 1.0
    """Factor on the (normalised) score, and on rewards of single tokens and turns."""
    shift: float = 0.0
    """Added to the scaled score, not to rewards of tokens and turns."""
    clip: float | None = None
    """Bound of the shifted score, in both directions; null: none."""
