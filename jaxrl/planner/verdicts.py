"""A plan from a config and a target: who is asked, what it comes to, whether it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxrl.config import Config
from jaxrl.config_checks import check_config
from jaxrl.flops import longest_flops
from jaxrl.models import ModelConfig
from jaxrl.planner.analytic import allowance, beside, estimated_steps, held, host_memory
from jaxrl.planner.asking import ask_compiler
from jaxrl.planner.memory import StepMemory, Verdict
from jaxrl.planner.remedies import find_remedies
from jaxrl.planner.run_shapes import RunShapes, shapes_of
from jaxrl.planner.targets import CHIPS, Target

__all__ = ["plan_run"]


def plan_run(
    config: Config,
    model: ModelConfig,
    target: Target,
    *,
    name: str = "",
    hbm: int | None = None,
    utilisation: float = 0.4,
    response_tokens: int | None = None,
    steps: Sequence[str] = ("score", "update"),
    keep: Path | None = None,
) -> Verdict:
    """Plan a run.

    Args:
        config: Its settings.
        model: Its model's shape; no weights are needed.
        target: Devices, and who is asked.
        name: Of the model.
        hbm: Bytes of a device; None: the chip's, where the target names one.
        utilisation: Part of the chip's peak that score and update are taken to reach.
        response_tokens: Mean length that FLOPs and times are for; None: rollout.max_new_tokens.
        steps: What a compiler is asked about; estimates always cover all.
        keep: Folder for the compiled programs' text.

    Raises:
        ConfigError: A setting is wrong, mesh sizes do not divide, or no row fits.
        PlanError: The compiler is not installed, or failed for another reason than memory.
    """
    check_config(config)
    shapes = shapes_of(config, model, target.devices)
    platform = CHIPS[target.chip].platform if target.chip else None
    estimates = estimated_steps(shapes, platform)
    found, versions = estimates, {"jax": jax.__version__}
    if target.compiles:
        answers, versions = ask_compiler(config, model, target, steps, hbm=hbm, keep=keep)
        found = tuple(
            dataclasses.replace(
                step,
                beside=beside(shapes, step.step),
                allowance=allowance(platform, step.peak),
            )
            for step in answers
        )
    limit = hbm or target.hbm
    fits, reason = judged(found, limit)
    remedies = ()
    if fits is False and limit is not None:
        # What a compiler finds more or less than the estimate it will find with other settings too.
        worst = max(found, key=lambda step: (step.refused is not None, step.needed))
        same = next(step for step in estimates if step.step == worst.step)
        scale = worst.needed / same.needed if target.compiles and not worst.refused else 1.0
        remedies = find_remedies(config, model, target.devices, platform, limit, scale)
    flops = longest_flops(config, model, response_tokens)
    return Verdict(
        target=str(target),
        model=name,
        parameters=shapes.parameters,
        mesh=shapes.sizes,
        layout=_layout(shapes),
        hbm=limit,
        held=held(shapes),
        steps=found,
        host=host_memory(shapes, target.devices_a_host),
        flops=flops,
        seconds=_seconds(flops, target, utilisation),
        fits=fits,
        reason=reason,
        remedies=remedies,
        versions=versions,
    )


def judged(steps: Sequence[StepMemory], limit: int | None) -> tuple[bool | None, str]:
    """Whether all steps fit, and the one that decides."""
    for step in steps:
        if step.refused:
            return False, f"the compiler refuses the {step.step} step: {_sentence(step.refused)}"
    worst = max(steps, key=lambda step: step.needed)
    size = f"the {worst.step} step needs {worst.needed / 2**30:.2f} GiB"
    if worst.source == "cpu":
        return None, f"{size} on CPU, an upper estimate that says nothing about other devices"
    if limit is None:
        return None, f"{size}; give --hbm, or a target that names the chip, for a verdict"
    word = "of" if worst.needed <= limit else "and there are"
    return worst.needed <= limit, f"{size} {word} {limit / 2**30:.2f} GiB"


def _sentence(refusal: str) -> str:
    """What matters of a compiler's message."""
    lines = [line.strip() for line in refusal.splitlines() if line.strip()]
    return " ".join(lines[:2])[:300]


def _layout(shapes: RunShapes) -> dict[str, int]:
    plan = shapes.layout
    return {
        "updates": plan.updates,
        "micros": plan.micros,
        "rows": plan.rows,
        "row_length": plan.row_length,
        "policy_length": plan.policy_length,
    }


def _seconds(flops: dict[str, float], target: Target, utilisation: float) -> dict[str, float]:
    """Of the steps that are bound by products; sampling is bound by memory."""
    if target.chip is None:
        return {}
    rate = CHIPS[target.chip].flops * target.devices * utilisation
    return {step: flops[step] / rate for step in ("score", "update")}
