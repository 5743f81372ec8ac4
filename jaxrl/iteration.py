"""One PPO iteration, top to bottom: prompts, rollouts, scores, plan, anchors, updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl.config import Config
from jaxrl.evaluation import score_trajectories
from jaxrl.packing import Plan, pack, plan
from jaxrl.progress import Progress
from jaxrl.rewards import adaptive_kl_coef
from jaxrl.scoring import Scores
from jaxrl.setup import Run
from jaxrl.sharding import batch_sharding, row_multiple
from jaxrl.stopping import StopSignal
from jaxrl.types import TrainState, Trajectory

__all__ = ["IterationResult", "iterate", "plan_for", "rollout_seed"]

IterationResult = tuple[TrainState, dict[str, float], list[Trajectory], np.ndarray]


def rollout_seed(seed: int, iteration: int) -> int:
    """Seed of an iteration's requests: a function of the run's seed and the iteration alone."""
    return int(np.random.SeedSequence([seed, iteration]).generate_state(1)[0])


def iterate(
    run: Run, state: TrainState, reference: Any, progress: Progress, stop: StopSignal
) -> IterationResult:
    """Advance `state` by one iteration.

    A stop is honoured up to the first update; from there the iteration is finished, so the state is
    always that of a whole number of iterations.
    """
    config, iteration = run.config, int(state.iteration)
    with progress.phase("rollout"):
        prompts = run.cursor.take(config.rollout.prompts)
        trajectories = run.engine.generate(
            prompts,
            samples=config.rollout.samples,
            sampling=run.sampling,
            seed=rollout_seed(config.seed, iteration),
        )
    stop.check()
    with progress.phase("reward"):
        scores = score_trajectories(run, trajectories)
    stop.check()
    with progress.phase("pack"):
        kept = [t for t, valid in zip(trajectories, scores.valid, strict=True) if valid]
        groups = np.arange(len(trajectories)) // config.rollout.samples
        layout = plan_for(config, kept, row_multiple(run.mesh))
        packed = jax.device_put(pack(kept, layout), batch_sharding(run.mesh))
        kept_scores = _padded(scores.values[scores.valid], config.trajectories)
        kept_groups = _padded(groups[scores.valid], config.trajectories)
    with progress.phase("score"):
        anchors = jax.block_until_ready(
            run.steps.score(state.policy_params, state.value_params, reference, packed)
        )
    with progress.phase("advantage"):
        batch, figures = run.steps.advantage(
            packed, anchors, kept_scores, kept_groups, state.kl_coef
        )
        figures = jax.device_get(figures)
    stop.check()
    with progress.phase("update"):
        per_update = []
        for _ in range(config.algorithm.epochs):
            for update in range(config.algorithm.updates):
                part = jax.tree.map(lambda x, u=update: x[u], batch)
                state, metrics = run.steps.update(state, part)
                per_update.append(metrics)
        per_update = jax.device_get(per_update)
        state = _finish(config, state, figures, len(kept))
    with progress.phase("publish"):
        run.engine.publish(state.policy_params, iteration + 1)
    metrics = _metrics(run, state, trajectories, scores, layout, figures, per_update)
    return state, metrics, trajectories, scores.values


def plan_for(config: Config, trajectories: Sequence[Trajectory], multiple: int) -> Plan:
    """The layout of these trajectories under the run's settings."""
    groups = [t.prompt.row for t in trajectories] if config.packing.share_prompts else None
    return plan(
        [len(t.prompt.ids) for t in trajectories],
        [len(t.response_ids) for t in trajectories],
        [sum(t.mask) for t in trajectories],
        groups=groups,
        updates=config.algorithm.updates,
        micro_batch_tokens=config.packing.micro_batch_tokens,
        row_lengths=config.packing.row_lengths,
        row_multiple=multiple,
    )


def _padded(values: np.ndarray, length: int) -> np.ndarray:
    """`values` with zeros to a fixed length, so that dropped completions compile nothing new."""
    dtype = np.float32 if values.dtype.kind == "f" else np.int32
    return np.pad(values.astype(dtype), (0, length - len(values)))


def _finish(
    config: Config, state: TrainState, figures: dict[str, Any], responses: int
) -> TrainState:
    """Count the iteration, and move the KL coefficient if it is adaptive."""
    kl_coef = state.kl_coef
    if config.algorithm.kl_target is not None and responses:
        kl_coef = adaptive_kl_coef(
            kl_coef,
            figures["kl/reference_sum"] / responses,
            target=config.algorithm.kl_target,
            horizon=config.algorithm.kl_horizon,
            n=responses,
        )
        kl_coef = jax.device_put(jnp.float32(kl_coef), state.kl_coef.sharding)
    iteration = jax.device_put(state.iteration + 1, state.iteration.sharding)
    return replace(state, iteration=iteration, kl_coef=kl_coef)


def _metrics(
    run: Run,
    state: TrainState,
    trajectories: Sequence[Trajectory],
    scores: Scores,
    layout: Plan,
    figures: dict[str, Any],
    per_update: list[dict[str, Any]],
) -> dict[str, float]:
    """Everything of the iteration that is not a time."""
    first = per_update[0]
    lengths = [len(t.response_ids) for t in trajectories]
    valid = scores.values[scores.valid]
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
