"""Every setting of a run: frozen dataclasses, a reason and a unit for each.

`config_io` turns YAML and ``key.sub=value`` into a `Config`; nothing else parses settings, and
`config_checks` holds ranges and the rules that concern several settings at once. Numbers that
follow from others are properties, never settings.
"""

# OmegaConf reads these annotations at run time: no `from __future__ import annotations` here.
from dataclasses import dataclass, field
from typing import Literal

from jaxrl.config.algorithm import AlgorithmConfig
from jaxrl.config.data import DataConfig, SourceConfig
from jaxrl.config.model import (
    CriticConfig,
    LogprobConfig,
    MeshConfig,
    OptimConfig,
    OptimizerConfig,
    PackingConfig,
    PolicyConfig,
)
from jaxrl.config.reward import (
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RewardServerConfig,
)
from jaxrl.config.rollout import RolloutConfig
from jaxrl.config.running import CheckpointConfig, EvalConfig, LogConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CriticConfig",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "LogprobConfig",
    "MeshConfig",
    "OptimConfig",
    "OptimizerConfig",
    "PackingConfig",
    "PolicyConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RewardModelConfig",
    "RewardServerConfig",
    "RolloutConfig",
    "SourceConfig",
]


@dataclass(frozen=True)
class Config:
    """A whole run."""

    run_dir: str = "runs/default"
    """Everything the run writes lies here."""
    seed: int = 0
    """Seeds data order, sampling and initialisation."""
    iterations: int = 100
    """Rollout-and-update rounds."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the checkpoint in run_dir if there is one (auto), refuse to start if there is one
    (never), or insist on one (must)."""
    model: PolicyConfig = field(default_factory=PolicyConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    logprob: LogprobConfig = field(default_factory=LogprobConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def trajectories(self) -> int:
        """Completions an iteration."""
        return self.rollout.prompts * self.rollout.samples

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps of the whole run: the horizon of every schedule."""
        return self.iterations * self.algorithm.epochs * self.algorithm.updates

    @property
    def max_tokens(self) -> int:
        """Longest trajectory: prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference policy takes part."""
        return self.algorithm.kl_in != "off"

    @property
    def needs_critic(self) -> bool:
        """Whether a value function takes part."""
        return self.algorithm.advantage_mode == "gae"
