"""One PPO iteration, top to bottom: rollouts, scores, plan, anchors, advantages, updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl.config import Config
from jaxrl.outcomes import judge, rewarded, too_old
from jaxrl.packing import Plan, pack, plan, slot_counts
from jaxrl.progress import Progress
from jaxrl.rewards import adaptive_kl_coef
from jaxrl.rollouts import Batch
from jaxrl.scoring import total_scores
from jaxrl.setup import Run
from jaxrl.sharding import batch_sharding, place, replicated, row_multiple
from jaxrl.stopping import StopSignal
from jaxrl.types import PackedBatch, TrainState, Trajectory

__all__ = ["IterationResult", "iterate", "pack_for", "plan_for"]


class IterationResult(NamedTuple):
    """What an iteration leaves behind."""

    state: TrainState
    metrics: dict[str, float]
    batch: Batch
    scores: np.ndarray
    """One for each of the batch's trajectories."""


def iterate(
    run: Run, state: TrainState, reference: Any, progress: Progress, stop: StopSignal
) -> IterationResult:
    """Advance `state` by one iteration.

    A stop is honoured up to the first update, at once while rollouts and rewards are waited for;
    from there the iteration is finished, so the state is always that of a whole number of them.
    """
    config, iteration = run.config, int(state.iteration)
    with stop.at_once(), progress.phase("rollout", total=config.trajectories) as count:
        batch = run.rollouts.take(iteration, on_done=lambda finished: count(len(finished)))
        trajectories = batch.trajectories
        run.engine.rest()
    stop.check()
    with progress.phase("pack"):
        outcomes, usable, moments = judge(config, iteration, batch, state.reward_moments)
        kept = [t for t, use in zip(rewarded(config, batch), usable, strict=True) if use]
        layout = plan_for(config, kept, row_multiple(run.mesh))
        packed = place(pack_for(config, kept, layout), batch_sharding(run.mesh))
    with progress.phase("score"):
        anchors = jax.block_until_ready(
            run.steps.score(state.policy_params, state.value_params, reference, packed)
        )
    with progress.phase("advantage"):
        outcomes_there = place(outcomes, replicated(run.mesh))
        trained, figures = run.steps.advantage(packed, anchors, outcomes_there, state.kl_coef)
        figures = jax.device_get(figures)
    stop.check()
    with progress.phase("update"):
        per_update = []
        for _ in range(config.algorithm.epochs):
            for update in range(config.algorithm.updates):
                part = jax.tree.map(lambda x, u=update: x[u], trained)
                state, metrics = run.steps.update(state, part)
                per_update.append(metrics)
        per_update = jax.device_get(per_update)
        state = _finish(config, state, figures, len(kept), moments)
    metrics = _metrics(run, state, batch, layout, figures, per_update)
    metrics["reward/trained_mean"] = float(np.mean(outcomes.scores[: len(kept)] if kept else 0.0))
    metrics |= _provenance(config, iteration, trajectories) | batch.figures | run.engine.figures()
    return IterationResult(state, metrics, batch, total_scores(trajectories, batch.scores))


def _provenance(
    config: Config, iteration: int, trajectories: Sequence[Trajectory]
) -> dict[str, float]:
    """How old the weights were that sampled the batch, and what is missing from it."""
    versions = [t.token_versions or (t.weight_version,) * len(t.response_ids) for t in trajectories]
    ages = iteration - np.concatenate(versions)
    return {
        "rollout/staleness_mean": float(ages.mean()),
        "rollout/staleness_max": float(ages.max()),
        "rollout/too_old": float(too_old(config, iteration, trajectories).sum()),
        "rollout/left_out": float(config.trajectories - len(trajectories)),
    }


def plan_for(config: Config, trajectories: Sequence[Trajectory], multiple: int) -> Plan:
    """The layout of these trajectories under the run's settings."""
    groups = [t.prompt.row for t in trajectories] if config.packing.share_prompts else None
    return plan(
        [len(t.prompt.ids) for t in trajectories],
        [len(t.response_ids) for t in trajectories],
        slot_counts(trajectories, **_slots(config)),
        groups=groups,
        updates=config.algorithm.updates,
        micro_batch_tokens=config.packing.micro_batch_tokens,
        row_lengths=config.packing.row_lengths,
        row_multiple=multiple,
    )


def pack_for(config: Config, trajectories: Sequence[Trajectory], layout: Plan) -> PackedBatch:
    """The trajectories in the rows of their layout, on the host."""
    return pack(trajectories, layout, **_slots(config))


def _slots(config: Config) -> dict[str, bool]:
    """Where values are needed besides the policy's own tokens."""
    return {
        "every_token": config.algorithm.gae_over == "response",
        "end_state": config.algorithm.truncated == "bootstrap",
    }


def _finish(
    config: Config,
    state: TrainState,
    figures: dict[str, Any],
    responses: int,
    moments: np.ndarray,
) -> TrainState:
    """Count the iteration and its scores, and move the KL coefficient if it is adaptive."""
    kl_coef: Any = np.asarray(state.kl_coef)
    if config.algorithm.kl_target is not None and responses:
        kl_coef = adaptive_kl_coef(
            kl_coef,
            figures["kl/reference_sum"] / responses,
            target=config.algorithm.kl_target,
            horizon=config.algorithm.kl_horizon,
            n=responses,
        )
    counted = {
        "iteration": np.int32(int(state.iteration) + 1),
        "kl_coef": np.float32(kl_coef),
        "reward_moments": np.asarray(moments, np.float32),
    }
    return replace(state, **place(counted, state.iteration.sharding))


def _metrics(
    run: Run,
    state: TrainState,
    batch: Batch,
    layout: Plan,
    figures: dict[str, Any],
    per_update: list[dict[str, Any]],
) -> dict[str, float]:
    """Everything of the iteration that is not a time."""
    first, trajectories, scores = per_update[0], batch.trajectories, batch.scores
    lengths = [len(t.response_ids) for t in trajectories]
    valid = total_scores(trajectories, scores)[scores.valid]
    metrics: dict[str, Any] = {
        "reward/mean": valid.mean() if len(valid) else np.nan,
        "reward/std": valid.std() if len(valid) else np.nan,
        "reward/invalid": float((~scores.valid).sum()),
        "rollout/response_length": np.mean(lengths),
        "rollout/tokens": float(sum(lengths)),
        "rollout/truncated_fraction": np.mean([t.truncated for t in trajectories]),
        "packing/efficiency": layout.efficiency,
        "packing/tokens": float(layout.used_tokens),
        "packing/trained_tokens": float(sum(len(t.ids) for t in trajectories)),
        "kl/coef": float(state.kl_coef),
        "updates/skipped": float(state.skipped),
        "first_update/ratio_mean": first["policy/ratio_mean"],
        "first_update/logprob_diff_max": first["policy/logprob_change_max"],
        "first_update/clip_fraction": first["policy/clip_fraction_up"]
        + first["policy/clip_fraction_down"],
    }
    for name, values in scores.per_function.items():
        metrics[f"reward/{name}"] = np.mean(values[scores.valid]) if len(valid) else np.nan
    for name in first:
        over = [update[name] for update in per_update]
        pick = np.max if name.endswith("_max") else np.min if name.endswith("_min") else np.mean
        metrics[name] = pick(over)
    metrics |= figures
    if not run.config.needs_reference:
        metrics = {k: v for k, v in metrics.items() if not k.startswith("kl/")}
    return {name: float(value) for name, value in metrics.items()}
