"""Where completions come from: the engine protocol, and the trainer's own sampler."""

from __future__ import annotations

from jaxrl.rollout.engine import RolloutEngine
from jaxrl.rollout.trainside import TrainsideEngine

__all__ = ["RolloutEngine", "TrainsideEngine"]
