"""Evaluation, checkpoints, and what a person sees."""

# OmegaConf reads these annotations at run time: no `from __future__ import annotations` here.
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CheckpointConfig",
    "EvalConfig",
    "LogConfig",
]


@dataclass(frozen=True)
class EvalConfig:
    """Held-out evaluation (section `eval`)."""

    every: int = 5
    """Iterations between evaluations; the first and last state always are. 0: only those."""
    max_new_tokens: int | None = None
    """Null takes rollout.max_new_tokens."""
    temperature: float = 0.0
    """0 is greedy."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving (section `checkpoint`)."""

    every: int = 10
    """Iterations between checkpoints; the last is always saved. 0: only the last."""
    keep: int = 2
    """Newest checkpoints kept."""
    best: str | None = None
    """Metric, e.g. eval/score: an iteration that beats all before in it is saved and kept besides
    the newest. Null: none is."""
    best_mode: Literal["max", "min"] = "max"
    """Whether larger or smaller is better."""
    export: bool = True
    """Write the trained policy as a Hugging Face folder at the end."""


@dataclass(frozen=True)
class LogConfig:
    """What a person sees (section `log`)."""

    tensorboard: bool = True
    """Event files beside metrics.jsonl."""
    samples: int = 4
    """Completions written out an iteration."""
    progress: bool = True
    """A line an iteration on the terminal."""
