"""Rules on evaluation, checkpoints and the record."""

from __future__ import annotations

from collections.abc import Iterator

from jaxrl.config import Config
from jaxrl.metrics import WALL_CLOCK

__all__ = ["running_rules"]


def running_rules(config: Config) -> Iterator[str]:
    """One message for each rule that `config` breaks."""
    best = config.checkpoint.best
    if best is None:
        if config.checkpoint.best_mode != "max":
            yield "checkpoint.best_mode=min is read with checkpoint.best only; set it to max"
    elif best.startswith(WALL_CLOCK):
        yield (
            f"checkpoint.best={best} depends on the machine and the moment, so a resumed run would "
            "keep another one; name a metric of the policy, e.g. eval/score"
        )
    elif best.startswith("eval/") and config.data.eval is None:
        yield (
            f"checkpoint.best={best} is measured on held-out prompts, and data.eval=null; give "
            "data.eval, or name a metric of the rollouts, e.g. reward/mean"
        )
    elif not best.startswith("eval/") and config.rollout.max_staleness:
        yield (
            f"checkpoint.best={best} may save any iteration, and rollout.max_staleness="
            f"{config.rollout.max_staleness} has begun the next ones by then, which a resumed run "
            "could not repeat; name a metric of evaluations, e.g. eval/score, or set "
            "rollout.max_staleness to 0"
        )
